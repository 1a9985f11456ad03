"""The core of the service: what every feature plugs into, and which knows none of them."""
