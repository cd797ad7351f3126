# The two commands of the README are `make demo` and `make test`. Everything is installed into .venv from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/quickstart

.PHONY: setup demo test test-all test-rest test-cpus test-versions test-hosts test-slurm fuzz soak parity site check release clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("soren-align needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev,docs]'
	touch $@

# SFT, then DPO from the model that came out, each with its evaluation; then all three in one table.
demo: setup
	rm -rf $(RUN)
	$(BIN)/soren-align sft quickstart/sft
	$(BIN)/soren-align dpo quickstart/dpo
	$(BIN)/soren-align eval $(RUN)/dpo --summary $(RUN)/summary.json

# The tests have five tiers (tests/support/tiers.py): unit, model, ranks, process, hosts. What a person waits for: the
# first two, but for long ones, and a sample of the others: 9,500 in 5 minutes on two cores.
test: TESTS := -m "(unit or model or sample) and not (slow or rest)"
# All tests, but those of two hosts and of Slurm. 30 minutes on two cores.
test-all: TESTS := -m "not (hosts or slurm)"
# What `make test` leaves out: .ci/run takes it after that.
test-rest: TESTS := -m "(not (unit or model or sample) or slow or rest) and not (hosts or slurm)"
# Python's cache of compiled files, also where the environment turns it off: pytest compiles 350 files of asserts.
test test-all test-rest test-cpus: export PYTHONDONTWRITEBYTECODE =
test test-all test-rest: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

# The first two tiers with the instruction sets and threads of other machines: one line for each of five settings, at most
# 45 minutes on two cores; `make test` is the sixth. `make test-cpus CPU=avx2-1` takes one (tests/cpus.py),
# CPU=rotating what .ci/run takes.
test-cpus: setup
	$(BIN)/python -m tests.cpus $(CPU)

# The trainers' tests with the oldest and newest versions of TRL, transformers and others that pyproject.toml allows.
test-versions: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.versions $(END)

# Jobs on Slurm (tests/slurm), whose daemons the tests start in a folder of theirs; on Debian, first
# apt install slurmctld slurmd slurm-client munge.
test-slurm: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -rs tests/slurm

# Training on two hosts, which are network namespaces of this machine: parity, a cut cable, a lost host. Linux, root and
# iproute2; skipped with a reason elsewhere. A quarter of an hour on two cores.
test-hosts: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m hosts -rs tests/hosts

# 8,800 changed recipes, overrides, data files and run folders: each is accepted, or refused in one sentence.
fuzz: SEED ?= $(shell date +%Y%m%d)
fuzz: setup
	FUZZ=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 tests/fuzz --hypothesis-seed=$(SEED)

# 292 faults on runs of every kind: kills, full disks, flipped bits, lost ranks. After each the same command must end with
# the same bits. Half an hour on two quiet cores; `make soak SEED=7` again continues. The table: research/reliability.md.
soak: SEED ?= $(shell date +%Y%m%d)
soak: setup
	$(BIN)/python -m tests.soak --seed $(SEED)

# How far 2 and 3 ranks are from one process, sharded in every way: the table of research/studies/parity.md. Three minutes.
parity: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sharding.parity

# The documentation as a site with search: open site/index.html. It needs no network when it is read.
site: setup
	$(BIN)/python docs/make_site.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

# Whether this commit can be published: builds dist/, tries it in an empty environment, prints the commands. No upload.
release: setup
	.ci/release

clean:
	rm -rf .venv runs dist build site
