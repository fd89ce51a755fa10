"""HTTP and text: what people see of the engine.

Knows: tokenizers, chat templates, text streams, request and answer shapes. Refuses to know: torch, weights, the device wing.
"""
