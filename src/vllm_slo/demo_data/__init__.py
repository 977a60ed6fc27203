"""The recorded run that `vllm-slo demo` loads; README.md beside this file says where it came from."""
