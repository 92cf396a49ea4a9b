SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help root build generate lint lint-prose peers test-setup test test-all bench demo

export CGO_ENABLED := 0

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
COMMIT := $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
# Two packages at a time leave the tests of agents the CPU that they need to be in time.
TESTFLAGS ?= -p 2 -timeout 20m

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

test-setup: root lint
	hack/deps test
	hack/peers
	hack/generated

test: test-setup ## run every test, the flow suite with each dataplane (as root; installs what is missing)
	go run ./test/runner -short $(TESTFLAGS)
	@echo "make test: all passed"

test-all: test-setup ## run every test, the long ones too, and all suites of traffic with each dataplane
	go run ./test/runner $(TESTFLAGS)
	@echo "make test-all: all passed"

bench: root build ## measure the way through a Service against the way without (as root)
	hack/deps bench
	bin/spillway-lab bench path
	bin/spillway-lab bench tftp
	bin/spillway-lab bench sync
	bin/spillway-lab bench notrack
	go test -run '^$$' -bench 'DumpMillion|ReadCounts|LookAt200Namespaces' -benchtime 5x -timeout 5m -p 1 ./internal/node/conntrack ./internal/diagnosis/doctor

demo: root ## five published experiments beside kube-proxy in quick form, with a report (as root; 5 minutes)
	@$(MAKE) --no-print-directory -j build demo-packages demo-kube-proxy
	bin/spillway-lab lab run all --quick

# At once: one downloads while another compiles.
.PHONY: demo-packages demo-kube-proxy
demo-packages:
	hack/deps demo
demo-kube-proxy:
	hack/peers kube-proxy >/dev/null
