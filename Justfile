# Everything goes through ./run; this file only saves typing.
default: lint test

lint:
    ./run lint

test *ARGS:
    ./run test {{ARGS}}

demo *ARGS:
    ./run demo {{ARGS}}

# Formats and mends what ruff can.
fix:
    ./run cli --version >/dev/null
    .venv/bin/python -m ruff check --fix
    .venv/bin/python -m ruff format

# Generated pages and golden files; read the diff.
golden:
    ./run cli --version >/dev/null
    .venv/bin/python -m pytest --rewrite-golden

# Newest versions that pyproject.toml allows, with hashes, for every platform.
lock:
    (sed -n 1p requirements.lock; echo 'setuptools>=77' | uv pip compile --universal --python-version 3.11 --upgrade \
        --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet --extra test pyproject.toml -) > requirements.lock.new
    mv requirements.lock.new requirements.lock
