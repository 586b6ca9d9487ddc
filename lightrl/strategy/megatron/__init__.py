"""Megatron: models of transformers computed by megatron-core, split by tensor, pipeline, context and expert."""
