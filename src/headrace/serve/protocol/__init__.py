"""The shapes of requests and responses, as strict pydantic models; the OpenAPI document is generated from them."""
