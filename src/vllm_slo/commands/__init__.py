"""The command line: one command a file, wired to the four packages; ``COMMANDS`` in ``vllm_slo.__main__`` lists them."""
