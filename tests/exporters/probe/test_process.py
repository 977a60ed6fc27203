"""What the parts of one process share."""

from __future__ import annotations

import os

from vllm_slo.exporters.probe.process import Process
from vllm_slo.exporters.probe.settings import Settings
from vllm_slo.exporters.probe.versions import VERSIONS


def test_the_first_to_know_says_what_the_process_is() -> None:
    process = Process(Settings.from_environment({}), VERSIONS[-1], "0.33.0")
    config = object()
    process.knows(config, "api_server")
    process.knows(object(), "engine_core")
    assert (process.kind, process.vllm_config) == ("api_server", config)


def test_an_engine_core_that_was_forked_from_an_api_server_is_none() -> None:
    process = Process(Settings.from_environment({}), VERSIONS[-1], "0.33.0")
    process.knows(object(), "api_server")
    child = os.fork()
    if not child:
        process.knows("its own", "engine_core")
        os._exit(0 if (process.kind, process.vllm_config) == ("engine_core", "its own") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.kind == "api_server"


def test_of_the_settings_bounds_and_classes_are_told() -> None:
    process = Process(Settings.from_environment({"VLLM_SLO_PRIORITIES": "-1,5"}), VERSIONS[-1], "0.33.0")
    assert process.described() == {"buckets": "short=4096,medium=32768,long", "priorities": "-1,5"}
