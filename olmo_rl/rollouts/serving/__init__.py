"""The other side of the wire: `recipe=serve`, the local engine behind the HTTP API of vLLM or SGLang."""
