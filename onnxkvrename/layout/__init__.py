"""The KV buffers of a model as a consumer sees them."""
