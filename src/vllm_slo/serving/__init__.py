"""What `vllm-slo up` runs: receiver, drain, maintenance and scraping in one process, the pages in another."""
