"""The web pages: what the API answers, for people who look. Server-rendered, beside the API under ``/``.

A page asks the functions behind the routes of the API, so that it shows what the JSON beside it says, with
the same scopes. There is no SQL here, and no second way to anything.
"""
