"""The HTTP interface, one router a resource."""
