# Everything a person or the CI runs. `make demo` and `make check` need Python >= 3.11 and make, nothing else.
.NOTPARALLEL:
.PHONY: help demo audit-demo messaging-demo queue-demo cluster-demo secure-demo spark-demo check tools test test-component test-integration localstack localstack-down simulate chaos bench soak supply-chain port-scan sbom docs pictures native lint constraints format types imports tidy clean

VENV := .venv
BIN := $(VENV)/bin
TOOLS := .venv-tools
DOCS := .venv-docs
PYTHON := $(BIN)/python
CODE := $(sort $(dir $(wildcard memq/*.py pyspark_memq/*.py memq_localstack/*.py tests/*.py benchmarks/*.py examples/*.py)))
JOBS ?= 4
SEEDS ?= 200
START ?= 1
SOAK_SEEDS ?= 5000
SOAK_MUTANTS ?= 0
PYTEST := $(PYTHON) -m pytest -q -n $(JOBS) --dist loadfile
MUTATE := $(PYTHON) -m tests.mutation.run
COMMIT := $(shell git rev-parse HEAD 2>/dev/null || echo 0)
DEV := $(VENV)/installed-dev
LIBRARIES := $(VENV)/installed-libraries
NATIVE := $(VENV)/installed-native
RUST := $(shell find native -type f ! -path 'native/target/*' ! -name Cargo.lock) $(shell command -v cargo)
DEMO := $(VENV)/installed-demo
CLUSTER := $(VENV)/installed-cluster
SPARK := $(VENV)/installed-spark

help:                           ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' Makefile | awk -F'|' '{printf "%-26s%s\n", $$1, $$2}'

demo: $(DEMO)                   ## the main job on real input: 336,776 records in, out, compared, audited
	@$(PYTHON) examples/demo.py

audit-demo: $(DEMO)             ## the same with a loss, a doubling and a damaged block, each named by the live audit
	@$(PYTHON) examples/audit_demo.py

messaging-demo: $(DEMO)         ## filters, retries, dead letters, delays and transactions, with programs killed meanwhile
	@$(PYTHON) examples/messaging_demo.py

queue-demo: $(DEMO)             ## flights as jobs in queues, with workers and brokers killed meanwhile; each acked once
	@$(PYTHON) examples/queue_demo.py

cluster-demo: $(CLUSTER)        ## the same on three brokers, S3, Kafka and ZooKeeper; a broker and the governor are killed
	@$(PYTHON) examples/cluster_demo.py

secure-demo: $(CLUSTER)         ## three brokers with TLS, identities and permissions; twelve attacks fail, a writer is stopped
	@$(PYTHON) examples/secure_demo.py

spark-demo: $(SPARK)            ## the same records in Spark: delays in batch and as a stream, equal to pandas'
	@$(PYTHON) examples/spark_demo.py

# Types take a minute of one core; the other one meanwhile has the lint, compiles all tests
# for the workers, and makes the archives of Java classes that are not there yet.
check: tools $(DEV)             ## everything that CI runs
	@$(MAKE) --no-print-directory types & types=$$!; \
	  $(MAKE) --no-print-directory lint imports docs; others=$$?; \
	  $(PYTHON) -m pytest -qq --collect-only tests >/dev/null; \
  $(PYTHON) -m tests.class_archives; \
	  wait $$types && exit $$others
	$(PYTHON) -m tests.second_try $(JOBS)
	@$(PYTHON) -m tests.without_kernel $(JOBS)
	@$(MUTATE) --gate --sample 12 --hand-sample 6 --seed $(COMMIT) --seconds 55 --jobs 2

tools:                          ## what the tests want of apt, if root on Debian runs this
	@.ci/tools

test: lint types imports        ## the rings that start nothing, below a minute
	HYPOTHESIS_PROFILE=quick $(PYTEST) -m "not thorough" tests/test_tidy.py tests/unit tests/contract tests/model tests/simulation

test-component: $(DEV)          ## parts with a broker, a cluster or a process of this machine
	$(PYTEST) tests/component

test-integration: $(DEV)        ## real processes on this machine
	$(PYTEST) tests/integration tests/chaos

localstack: $(CLUSTER)          ## real Kafka, ZooKeeper, S3 and three brokers; `make localstack-down` stops them
	@$(PYTHON) -m memq_localstack up

localstack-down: $(CLUSTER)     ## stops them; their data stay
	@$(PYTHON) -m memq_localstack down

simulate: $(DEV)                ## the whole cluster on virtual time: SEEDS=N START=n|fresh JOBS=N, or SEED=n LEVEL=l TRACE=1
	@$(PYTHON) -m tests.simulation.run $(if $(LEVEL),--level $(LEVEL)) $(if $(TRACE),--trace) \
	  $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --start $(START) --jobs $(JOBS))

chaos: $(DEV)                   ## real servers and clients under a plan of faults: MINUTES=60 SEED=7, BEFORE=revision to upgrade from
	@$(PYTHON) -m tests.chaos.run --minutes $(or $(MINUTES),3) --seed $(or $(SEED),1) $(if $(BEFORE),--before $(BEFORE))

mutate: $(DEV)                  ## small faults in the product, which tests must find: MODULE=FILE|PART SAMPLE=N SEED=n JOBS=n
	@$(MUTATE) --jobs $(JOBS) $(if $(MODULE),--module "$(MODULE)") $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED))

bench: $(DEV)                   ## ratios against peers and limits: ROWS="start memory" QUICK=1 JSON=FILE
	@$(PYTHON) -m benchmarks $(ROWS) $(if $(QUICK),--quick) $(if $(JSON),--json $(JSON))

soak: $(DEV)                    ## every promise as often as it says, on real servers, then a long simulation and all mutants: hours
	MEMQ_SOAK=1 MEMQ_REQUIRE_SERVERS=1 $(PYTHON) -m pytest -v -s -m soak -o faulthandler_timeout=14400 tests
	@$(PYTHON) -m tests.simulation.run --seeds $(SOAK_SEEDS) --start fresh --jobs $(JOBS)
	@$(MUTATE) --jobs $(JOBS) --sample $(SOAK_MUTANTS)
	@$(MAKE) port-scan

native: $(LIBRARIES)            ## build the compiled kernel and install it, where cargo is found
	@.ci/native $(VENV)
	@touch $(NATIVE)

supply-chain:                   ## bandit over the packages, pip-audit over the pinned libraries; in an environment of its own
	@.ci/tools-venv $(TOOLS)
	@$(TOOLS)/bin/python -m tests.supply_chain

docs:                           ## the site of the documents, in build/site; strict: a broken link fails
	@.ci/docs-venv $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "build/site: python3 -m http.server --directory build/site"

pictures:                       ## draw docs/pictures/*.svg again from their sources, with graphviz
	@cd docs/pictures && for picture in *.dot; do dot -Tsvg "$$picture" -o "$${picture%.dot}.svg"; done

port-scan: $(DEV)               ## scan the ports of a broker and of both dashboards for weak TLS with sslyze; two minutes
	@.ci/tools-venv $(TOOLS)
	@$(PYTHON) -m tests.port_scan $(TOOLS)/bin/sslyze

sbom:                           ## write the list of libraries of a release (CycloneDX) to sbom.json
	@.ci/tools-venv $(TOOLS)
	@$(TOOLS)/bin/cyclonedx-py requirements constraints.txt --output-reproducible --output-file sbom.json

lint: $(DEV)                    ## ruff, and the words of docs, help texts and docstrings
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(PYTHON) tests/language.py

constraints: $(DEV)             ## write constraints.txt: the versions of all libraries that are installed
	@sed -n '/^#/p' constraints.txt > constraints.new
	@$(PYTHON) -m pip freeze --exclude-editable --disable-pip-version-check | grep -v '^memq' >> constraints.new
	@mv constraints.new constraints.txt

format: $(DEV)                  ## ruff, mending what it can
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

types: $(DEV)                   ## mypy --strict
	@$(PYTHON) -m mypy $(CODE)

imports: $(DEV)                 ## the layers
	@$(BIN)/lint-imports --no-logo

tidy: $(DEV)                    ## the house rules
	@$(PYTHON) -m pytest -q tests/test_tidy.py

clean:                          ## removes what make made
	rm -rf $(VENV) $(TOOLS) $(DOCS) native/target native/Cargo.lock build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .mutation

# Installs again only when pyproject.toml changed. `dev` holds what the others need, `cluster` what `demo` needs.
# `libraries` is `dev` without the compiled kernel, which is built again when native/ changes, or a cargo appears.
$(DEV): $(LIBRARIES) $(NATIVE)
	@touch $(DEV)

$(LIBRARIES): pyproject.toml .ci/venv
	@.ci/venv $(VENV) dev
	@touch $(LIBRARIES) $(DEMO) $(CLUSTER) $(SPARK)

$(NATIVE): .ci/native $(RUST) | $(LIBRARIES)
	@.ci/native $(VENV)
	@touch $(NATIVE)

$(CLUSTER): pyproject.toml .ci/venv
	@.ci/venv $(VENV) demo,cluster,localstack,certs
	@touch $(DEMO) $(CLUSTER)

$(SPARK): pyproject.toml .ci/venv
	@.ci/venv $(VENV) demo,localstack,spark
	@touch $(DEMO) $(SPARK)

$(DEMO): pyproject.toml .ci/venv
	@.ci/venv $(VENV) demo
	@touch $(DEMO)
