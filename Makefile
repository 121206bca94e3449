# The contributor's whole interface; CI runs nothing else. `make` lists it.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

TOOLS := .cache/tools
BIN   := $(TOOLS)/bin

POLICY   ?= examples/policy.yaml
FUZZTIME ?= 30s
COUNT    ?= 1

VERSION = $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
COMMIT  = $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
DATE    = $(shell git log -1 --format=%cI 2>/dev/null || echo unknown)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: run
run: build ## serve POLICY from memory (examples/policy.yaml)
	bin/weir serve --policy $(POLICY)

.PHONY: build
build: ## build bin/weir, one static binary
	CGO_ENABLED=0 go build -trimpath -o bin/weir \
		-ldflags '-X main.version=$(VERSION) -X main.commit=$(COMMIT) -X main.date=$(DATE)' ./cmd/weir

.PHONY: test
test: servers ## run the tests, with the race detector, in a random order
	source $(TOOLS)/env.sh; WEIR_REQUIRE_TOOLS=1 go test -race -shuffle=on -timeout 20m ./...
	go -C bench test -race -shuffle=on -timeout 5m ./...

.PHONY: faults
faults: servers ## break networks and Redises under load, COUNT times (1); make test does it once too
	source $(TOOLS)/env.sh; WEIR_REQUIRE_TOOLS=1 go test -race -shuffle=on -count=$(COUNT) -timeout 60m ./faults

.PHONY: soak
soak: servers ## the same at random for WEIR_SOAK (10m), with a report; not in CI
	source $(TOOLS)/env.sh; WEIR_REQUIRE_TOOLS=1 WEIR_SOAK=$${WEIR_SOAK:-10m} go test -race -count=1 -timeout 0 -run Soak -v ./faults

.PHONY: fuzz
fuzz: servers ## run every fuzz target for FUZZTIME (30s)
	source $(TOOLS)/env.sh; WEIR_REQUIRE_TOOLS=1 scripts/fuzz.sh $(FUZZTIME)

.PHONY: bench
bench: servers ## measure weir beside a server that does nothing, and compare with what was kept
	source $(TOOLS)/env.sh; scripts/bench.sh

.PHONY: bench-keep
bench-keep: servers ## the same, and keep it in bench/kept.json
	source $(TOOLS)/env.sh; BENCH_KEEP=1 scripts/bench.sh

.PHONY: profile
profile: servers ## profile weir in one SCENARIO (one bucket), with CALLERS (64), on STORE (redis)
	source $(TOOLS)/env.sh; scripts/bench.sh profile

.PHONY: demo
demo: ## run docker-compose.yml, and show what weir does (needs Docker)
	@{ docker version && docker compose version; } >/dev/null 2>&1 || \
		{ echo 'make demo needs a Docker daemon that answers, and docker compose; without them: make compose-test (root, Linux x86_64)' >&2; exit 1; }
	docker compose up --build --detach --wait
	go run ./demo

.PHONY: compose-test
compose-test: servers $(BIN)/docker-compose ## the same without Docker: with one of its own (needs root, Linux x86_64)
	scripts/compose-test.sh

.PHONY: lint
lint: $(BIN)/golangci-lint $(BIN)/buf ## check the Go code and the proto files
	$(BIN)/golangci-lint config verify
	$(BIN)/golangci-lint run ./...
	go -C bench vet ./...
	$(BIN)/buf lint

.PHONY: fmt
fmt: $(BIN)/golangci-lint ## format the Go code
	$(BIN)/golangci-lint fmt

.PHONY: generate
generate: $(BIN)/buf $(BIN)/protoc-gen-go ## regenerate the code of proto/
	$(BIN)/buf generate

.PHONY: verify
verify: $(BIN)/golangci-lint $(BIN)/buf $(BIN)/protoc-gen-go ## check that all is tidy, formatted and freshly generated
	BIN=$(BIN) scripts/verify.sh

.PHONY: vuln
vuln: ## look for known vulnerabilities (asks the Go vulnerability database: needs the network, so not in CI)
	go run golang.org/x/vuln/cmd/govulncheck@v1.1.4 ./...

.PHONY: ci
ci: test lint verify fuzz ## what CI runs

# servers puts the Redises and the Envoy of the tests in place: $(TOOLS)/env.sh names them.
.PHONY: servers
servers:
	scripts/tools.sh

# The Go tools, each built from its own module under tools/, since their
# dependencies disagree. A changed go.mod or go.sum builds them again.
$(BIN)/golangci-lint: tools/lint/go.mod tools/lint/go.sum
	GOBIN=$(CURDIR)/$(BIN) go -C $(<D) install tool
	touch $@

$(BIN)/buf: tools/buf/go.mod tools/buf/go.sum
	GOBIN=$(CURDIR)/$(BIN) go -C $(<D) install tool
	touch $@

$(BIN)/protoc-gen-go: tools/protoc/go.mod tools/protoc/go.sum
	GOBIN=$(CURDIR)/$(BIN) go -C $(<D) install tool
	touch $@

$(BIN)/docker-compose: tools/compose/go.mod tools/compose/go.sum
	go -C $(<D) build -trimpath -o $(CURDIR)/$@ github.com/docker/compose/v2/cmd
