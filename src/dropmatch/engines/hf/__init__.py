"""The Hugging Face engine: load, generate, stream, and the adapter for `model.generate(custom_generate=…)`."""
