"""Security: API keys and sessions, principals, rate limits, redaction.

Requests are admitted in `dcp.server.core.http.admission`.
"""
