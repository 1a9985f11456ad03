"""Shell of the web pages: rendering, shared templates and files, forms, errors.

Pages of features call the functions behind the API routes, so they show the same data with the same scopes.
"""
