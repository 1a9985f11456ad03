"""What every request goes through before its route, from the outside in: plain ASGI, one module each."""
