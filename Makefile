# Two commands do everything on a fresh Debian machine: `make demo` and `make test`.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
PYTHON ?= python3
# Not from the environment, where a kernel developer may have another word of that name.
ARCH := amd64
QEMU_PACKAGES := qemu-system-x86 qemu-system-arm
APT_PACKAGES := $(QEMU_PACKAGES) busybox-static chromium fish gdb-multiarch libdw1 man-db trace-cmd zsh
APT := $(if $(filter 0,$(shell id -u)),,sudo) env DEBIAN_FRONTEND=noninteractive apt-get -qq
APT_INSTALL := $(APT) update && $(APT) install -y --no-install-recommends
# Tests and benchmarks mean guests, also on a machine whose own kernel can be probed.
export KPROBES_TARGET ?= guest
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Container images set it; every `kprobe` that a test starts would compile all its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check docs storm fuzz matrix kvm mutants sweep bench runtime fmt dist install changelog clean
.DEFAULT_GOAL := help

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 12

$(STAMPS)/venv: pyproject.toml
	@echo "== Python packages into $(VENV) (first time: about half a minute)"
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "== Debian packages: python3-venv"; \
		$(APT_INSTALL) python3 python3-venv >/dev/null; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --editable '.[dev]'
	@mkdir -p $(STAMPS) && touch $@

# QEMU before 8.1 may run an emulated CPU on through old text while another one patches it: a guest
# that patches itself (its own ftrace, its own kprobes) crashes. Debian 12 has 8.1's successors
# in its backports.
BUILD_PACKAGES := linux-source-6.1 gcc clang-19 lld-19 llvm-19 make flex bison bc libelf-dev dwarves xz-utils \
	linux-perf
BACKPORTS := $(STAMPS)/backports.list
FROM_BACKPORTS := -o Dir::Etc::SourceList=$(abspath $(BACKPORTS)) -t bookworm-backports

$(STAMPS)/apt: Makefile
	@mkdir -p $(STAMPS)
	@for package in $(APT_PACKAGES); do \
		dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; \
	done; \
	if [ -n "$$missing" ]; then \
		echo "== Debian packages:$$missing"; \
		$(APT_INSTALL) $$missing >/dev/null; \
	fi
	@if grep -q '^VERSION_CODENAME=bookworm' /etc/os-release && \
		for package in $(QEMU_PACKAGES); do dpkg-query -W -f '$${Version}\n' $$package; done | \
			{ while read -r version; do dpkg --compare-versions "$$version" lt 1:8.1 && exit 0; done; exit 1; }; then \
		echo "== Debian packages: $(QEMU_PACKAGES) from bookworm-backports"; \
		mirror=$${KPROBES_DEBIAN_MIRROR:-$$(apt-get indextargets --format '$$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/*$$')}; \
		{ cat /etc/apt/sources.list 2>/dev/null; \
			echo "deb $$mirror bookworm-backports main"; } >$(BACKPORTS); \
		{ $(APT) $(FROM_BACKPORTS) update && \
			$(APT) $(FROM_BACKPORTS) install -y --no-install-recommends $(QEMU_PACKAGES) >/dev/null; } || \
			echo "== not to be had: guests that patch their own text may crash in their emulator"; \
	fi
	@touch $@

# What builds kernels: tests/build/own_kernels.py.
$(STAMPS)/apt-build: Makefile
	@mkdir -p $(STAMPS)
	@$(APT_INSTALL) $(BUILD_PACKAGES) >/dev/null
	@touch $@

# Make shows the command itself, so that everybody can go on from it.
demo: $(STAMPS)/venv $(STAMPS)/apt ## boot a kernel, probe it, print its events (ARCH=arm64: an arm64 one)
	$(BIN)/kprobe trace --target guest --arch $(ARCH) --comm ls --comm cat \
	  'p:open do_sys_openat2 dfd=$$arg1:s32 path=+0($$arg2):ustring flags=+0($$arg3):x64' \
	  'p:write vfs_write bytes=$$arg3:u64 task=$$comm' \
	  -- 'cat /no/such/file; ls /; cat /proc/version'

# A guest has two CPUs and up to 2 GiB. The tests of a file share their guests: one process has them.
PROCESSES := -n auto --maxprocesses 4

# A guest that its emulator let down takes all tests that share it along: what failed is run once
# more, alone, and both runs are shown. What passes then is a defect all the same: it is named at
# the end, and counted. A run that came to no end (a status above 1) stays one.
SECOND_TRIES := $(STAMPS)/second-tries
# To look through the others for tests with guests takes every process seven seconds.
GUEST_TESTS := tests/system tests/project
GUEST_MARKS := guest and not matrix and not sweep
test: check $(STAMPS)/apt ## every test, with real kernels
	@rm -f $(SECOND_TRIES); \
	run() { KPROBES_NO_SKIP=1 $(BIN)/pytest --timeout 600 --durations=30 --second-tries=$(SECOND_TRIES) $(GUEST_TESTS) "$$@"; }; \
	twice() { \
		run -m "$$1" $$2 --cache-clear && return; status=$$?; [ $$status = 1 ] || return $$status; \
		echo "== what failed above, once more in new guests"; \
		run -m "$$1" --last-failed --last-failed-no-failures none; \
	}; \
	twice '$(GUEST_MARKS) and not harm and not alone' '$(PROCESSES) --dist loadfile'; most=$$?; \
	echo "== what works hard at harming its guest"; \
	twice '$(GUEST_MARKS) and harm' '-n 2 --dist loadfile'; harm=$$?; \
	echo "== what must be alone on the machine"; \
	twice '$(GUEST_MARKS) and alone' && exit $$((most | harm))

check: $(STAMPS)/venv ## format, lint, types, floors, unit tests: no kernel, no network
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/pytest -m 'not guest and not storm and not fuzz and not sweep' $(PROCESSES) --dist worksteal

$(STAMPS)/docs: $(STAMPS)/venv
	@$(BIN)/pip install --quiet --editable '.[docs]'
	@touch $@

docs: $(STAMPS)/docs ## build this documentation as a site, in .site
	@$(BIN)/properdocs build --quiet --strict -f mkdocs.yml

storm: $(STAMPS)/venv ## the unit tests' wide sweeps: millions of cases
	@$(BIN)/pytest -m storm

fuzz: $(STAMPS)/venv ## a million texts for each parser of what people write
	@$(BIN)/pytest -m fuzz

matrix: $(STAMPS)/venv $(STAMPS)/apt $(STAMPS)/apt-build ## the same tests on the kernels that `make test` leaves out
	@KPROBES_NO_SKIP=1 $(BIN)/pytest -m 'matrix and not sweep' --timeout 600

kvm: $(STAMPS)/venv $(STAMPS)/apt ## the tests with guests under KVM, where this machine has it; a page to send in
	@KPROBES_NO_SKIP=1 $(BIN)/python tools/kvm.py

mutants: $(STAMPS)/venv $(STAMPS)/apt ## change the engine in 60 places, one at a time: the tests named for each must fail
	@$(BIN)/python tools/mutants.py

sweep: $(STAMPS)/venv $(STAMPS)/apt ## probe every instruction of what runs, and thousands at once
	@$(BIN)/pytest -m sweep --log-level=INFO

bench: $(STAMPS)/venv $(STAMPS)/apt ## measure, beside the guest kernel's own probes; ARCH=arm64 for such guests
	@$(BIN)/python -m bench --arch $(ARCH)

# Debian 12's; any since 15 does.
CLANG := clang-19
runtime: $(STAMPS)/venv ## compile the guest-side runtime's C, when it was changed; needs clang
	@$(BIN)/python tools/compile_runtime.py $(CLANG)

fmt: $(STAMPS)/venv ## format the source
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

PREFIX := /usr/local
# A packager's staging directory has no dependencies. Debian's Python would put "local" below any prefix.
STAGED := $(if $(DESTDIR),--root '$(DESTDIR)' --no-deps --ignore-installed)
install: dist ## kprobe, its manual pages and completion for PYTHON, below PREFIX; DESTDIR before it to stage
	@DEB_PYTHON_INSTALL_LAYOUT=deb $(BIN)/pip --quiet --python "$$(command -v $(PYTHON))" install --root-user-action ignore --prefix '$(PREFIX)' $(STAGED) $(DIST)/*.whl

DIST := dist
dist: $(STAMPS)/venv ## a wheel and a source package, in dist/
	@rm -rf $(DIST)
	@$(BIN)/python -m build --no-isolation --outdir $(DIST)

# For a new version, after it was set in pyproject.toml.
changelog: $(STAMPS)/venv ## move the fragments of changelog/ into CHANGELOG.md, as this version's
	@$(BIN)/towncrier build --yes

clean: ## remove what make made here
	rm -rf $(VENV) $(STAMPS) .site .pytest_cache .ruff_cache .import_linter_cache .hypothesis
