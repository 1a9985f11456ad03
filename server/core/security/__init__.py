"""Who may do what: API keys, whom they stand for, and how often one may ask.

How a request shows its key is in `dcp.server.core.http.admission`.
"""
