"""Security: API keys and sessions, principals, rate limits.

`dcp.server.core.http.admission` admits requests.
"""
