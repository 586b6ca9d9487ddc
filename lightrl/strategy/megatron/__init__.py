"""Megatron: runs transformers models with megatron-core, split by tensor, pipeline, context and expert."""
