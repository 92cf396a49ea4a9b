SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help root build generate lint lint-prose peers test test-all bench demo

export CGO_ENABLED := 0

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
COMMIT := $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
# Tests that make network namespaces take turns by package; two at a time leave
# them the CPU that they need to be in time. What they test is the kernel as much
# as the code: a cached result says nothing.
TESTFLAGS ?= -p 2 -count=1 -timeout 20m

# The flow suite, that of files and the hostile one run with eBPF like any test, and
# once more with each of these, but for the test that has all dataplanes in one cluster.
OTHER_DATAPLANES := -proxy-mode,nftables \
	-proxy-mode,iptables,-iptables-variant,legacy -proxy-mode,iptables,-iptables-variant,nft

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

root:
	@[ "$$(id -u)" = 0 ] || { echo "make $(MAKECMDGOALS): not root: run it as root" >&2; exit 1; }

build: ## build bin/spillway and bin/spillway-lab, static binaries
	go build -trimpath -ldflags '-s -w -X spillway.dev/spillway/internal/cli.version=$(VERSION) -X spillway.dev/spillway/internal/cli.commit=$(COMMIT)' -o bin/spillway ./cmd/spillway
	go build -trimpath -ldflags '-s -w -X spillway.dev/spillway/internal/cli.version=$(VERSION) -X spillway.dev/spillway/internal/cli.commit=$(COMMIT)' -o bin/spillway-lab ./cmd/spillway-lab

generate: ## compile bpf/ with clang-19 and make the Go code around it
	hack/deps generate
	go generate ./...

GOLANGCI_LINT := go tool -modfile=hack/tools/go.mod golangci-lint
VALE := CGO_ENABLED=1 go tool -modfile=hack/vale/go.mod vale

lint: lint-prose ## check format, vet, golangci-lint with the dependency rules, and prose
	@unformatted=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); \
	if [ -n "$$unformatted" ]; then echo "not formatted, run gofmt -w on: $$unformatted" >&2; exit 1; fi
	go vet ./...
	go -C test/deploy vet ./...
	$(GOLANGCI_LINT) run ./...
	go test ./test/lint

# Vale parses Go with a library in C, so building it needs gcc.
lint-prose: ## check the prose of documents and Go comments
	@command -v gcc >/dev/null || hack/deps lint
	$(VALE) --output=line $$(git ls-files -co --exclude-standard '*.md' '*.go' ':!*_bpfe[bl].go')

peers: ## build kube-apiserver, kube-controller-manager and kube-proxy unless they are there
	hack/peers

test: root lint ## run everything that must pass (as root; installs what is missing)
	hack/deps test
	hack/peers
	hack/generated
	{ go test -json $(TESTFLAGS) ./... && go -C test/deploy test -json -count=1 ./... && for flags in $(OTHER_DATAPLANES); do \
		go test -json $(TESTFLAGS) -skip TestFlowsFromAPI ./test/flows ./test/files ./test/hostile $${flags//,/ } || exit; done; } | \
		go run ./test/skips -allow test/skips/allow.txt
	@echo "make test: all passed"

test-all: test ## run that, and the hostile suite in full on every dataplane
	{ go test -json $(TESTFLAGS) ./test/hostile -args -all && for flags in $(OTHER_DATAPLANES); do \
		go test -json $(TESTFLAGS) ./test/hostile $${flags//,/ } -args -all || exit; done; } | \
		go run ./test/skips -allow test/skips/allow.txt
	@echo "make test-all: all passed"

bench: root build ## measure the way through a Service against the way without (as root)
	hack/deps bench
	bin/spillway-lab bench path
	bin/spillway-lab bench tftp
	bin/spillway-lab bench sync
	bin/spillway-lab bench notrack
	go test -run '^$$' -bench 'DumpMillion|ReadCounts|LookAt200Namespaces' -benchtime 5x -timeout 5m -p 1 ./internal/node/conntrack ./internal/diagnosis/doctor

demo: root build ## five published experiments in quick form, with a report (as root; 5 minutes)
	hack/deps demo
	bin/spillway-lab lab run all --quick
