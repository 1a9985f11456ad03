"""The shell of the web pages: rendering, templates and files that features share, forms, errors.

Pages of features use the functions behind the routes of the API, so that they show the same as the JSON, with
the same scopes.
"""
