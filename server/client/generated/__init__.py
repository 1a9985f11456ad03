"""The API of the service, generated from its OpenAPI document by ``make client``."""
