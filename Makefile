SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help root repository build docs image image-lock image-push release cluster generate lint lint-prose lint-proto peers test test-all test-cluster test-kernels test-xdp bench bench-end-to-end bench-packet demo

export CGO_ENABLED := 0
# Tests, linters, the image and hack/peers' programs then share hundreds of compiled packages.
export GOFLAGS := $(strip $(shell go env GOFLAGS 2>/dev/null) -trimpath)

VERSION := $(file <VERSION)
COMMIT := $(shell git describe --always --abbrev=40 --exclude '*' --dirty 2>/dev/null || echo unknown)
BUILD := build -trimpath -buildvcs=false -ldflags '-s -w -X spillway.dev/spillway/internal/cli.version=$(VERSION) -X spillway.dev/spillway/internal/cli.commit=$(COMMIT)'
ARCHITECTURES := amd64 arm64
BIN := $(CURDIR)/bin

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

root:
	@[ "$$(id -u)" = 0 ] || { echo "make $(MAKECMDGOALS): not root: run it as root" >&2; exit 1; }

build: ## build bin/spillway and bin/spillway-lab, static binaries
	go $(BUILD) -o $(BIN)/ ./cmd/spillway
	go -C lab $(BUILD) -o $(BIN)/ ./cmd/spillway-lab

image: ## write the image for amd64 and arm64 to bin/image and bin/image.tar, without a container engine
	for arch in $(ARCHITECTURES); do GOARCH=$$arch go $(BUILD) -o $(BIN)/linux-$$arch/ ./cmd/spillway; done
	go -C hack/image run ./build -version $(VERSION) -commit $(COMMIT) -created $$(git log -1 --format=%ct) -bin $(BIN) $(if $(filter release,$(MAKECMDGOALS)),-locked)

release: image ## write archives, image, chart, SBOMs, notes and checksums to dist/
	for arch in $(ARCHITECTURES); do GOARCH=$$arch go -C lab $(BUILD) -o $(BIN)/linux-$$arch/ ./cmd/spillway-lab; done
	go -C hack/man run . -version $(VERSION) -created $$(git log -1 --format=%ct) -dir $(BIN)/man/man1
	go -C hack/image run ./release -version $(VERSION) -created $$(git log -1 --format=%ct) -bin $(BIN) -dist $(CURDIR)/dist

repository:
	@[ -n "$(REPOSITORY)" ] || { echo "make $(MAKECMDGOALS): no repository: give REPOSITORY=REGISTRY/spillway" >&2; exit 1; }

image-push: repository image ## push the image and its SBOMs to REPOSITORY
	go -C hack/image run ./push -layout $(BIN)/image -to $(REPOSITORY):$(VERSION)

image-lock: ## bring the Debian packages of the image up to date
	go -C hack/image run ./build -lock

cluster: root image ## start a real cluster of three nodes with Spillway (as root)
	hack/deps cluster
	go -C test/cluster build -o $(BIN)/spillway-cluster ./cmd/cluster
	$(BIN)/spillway-cluster up

generate: ## compile bpf/ with clang-19 and make the Go code around it, and that of api/proto
	hack/deps generate
	go generate ./...

.PHONY: reference
reference: ## write docs/reference, the chart's README and its schema from the code and the chart
	go -C hack/reference run .

BUF := go tool -modfile=hack/proto/go.mod buf
ACTIONLINT := go tool -modfile=hack/actionlint/go.mod actionlint -shellcheck= -pyflakes=
VALE := CGO_ENABLED=1 go tool -modfile=hack/vale/go.mod vale

lint: lint-prose ## check format, golangci-lint with vet and the dependency rules, prose, and that the reference is current
	@unformatted=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); \
	if [ -n "$$unformatted" ]; then echo "not formatted, run gofmt -w on: $$unformatted" >&2; exit 1; fi
	for module in test/deploy test/cluster; do go -C $$module vet ./...; done
	hack/lint
	$(ACTIONLINT)
	go test ./test/lint
	go -C hack test ./reference

lint-proto: ## check the names of api/proto; buf takes two minutes to compile, so only test-all runs it
	$(BUF) lint api/proto

# Vale parses Go with a library in C and C++.
lint-prose: ## check the prose of documents and Go comments
	@command -v g++ >/dev/null || hack/deps lint
	$(VALE) --output=line $$(git ls-files -co --exclude-standard '*.md' '*.go' ':!*_bpfe[bl].go' ':!*.pb.go' ':!*.connect.go')

# Another nodejs than Debian's may be there, with its own npm.
.PHONY: ui
ui: ## build the page of spillway ui in ui/dist (installs node if it is missing)
	@command -v npm >/dev/null || hack/deps ui
	@command -v protoc >/dev/null || hack/deps generate
	npm --prefix ui ci --ignore-scripts --no-audit --no-fund
	npm --prefix ui run all

docs: ## build the site of the documents in site/, and check its links
	hack/deps docs
	hack/docs/build

peers: ## build kube-apiserver, kube-controller-manager, kube-proxy, etcd and an OpenTelemetry collector unless they are there
	hack/peers

test: root ## the gate: install what is missing, lint, and run every test (as root)
	go run ./test/runner

test-all: root ## the same with the long tests, all suites of traffic with each dataplane, and real clusters
	go run ./test/runner -all

test-cluster: root ## run the whole matrix on real clusters, or ROWS=EXPRESSION of it (as root; hours)
	hack/deps cluster
	go -C test/cluster run ./cmd/matrix -rows '$(ROWS)'

test-kernels: root ## run the tests of eBPF on Debian's kernels, or on KERNELS="NAME...", in virtual machines (as root; hours)
	hack/kernels $(KERNELS)

test-xdp: root ## run XDP in the driver of network cards, in virtual machines with KERNELS="NAME..." (as root; 10 minutes each)
	hack/kernels -x $(or $(KERNELS),6.12)

bench: root build ## measure the way through a Service against the way without (as root)
	hack/deps bench
	bin/spillway-lab bench path
	bin/spillway-lab bench tftp
	bin/spillway-lab bench sync
	bin/spillway-lab bench notrack
	go test -run '^$$' -bench 'DumpMillion|ReadCounts|LookAt200Namespaces' -benchtime 5x -timeout 5m -p 1 ./internal/node/conntrack ./internal/diagnosis/doctor

bench-end-to-end: root build ## measure nodes with an agent against nodes without (as root; 5 minutes)
	hack/deps bench
	bin/spillway-lab bench end-to-end

bench-packet: root ## measure what a program takes for a packet, in ns (as root; a minute)
	go test ./internal/dataplane/ebpf -run '^$$' -bench Packet -benchtime 100x -v

.PHONY: bench-apiserver
bench-apiserver: build ## measure what 200 agents cost a real API server (half an hour, 10 GiB of memory)
	hack/peers kube-apiserver etcd >/dev/null
	bin/spillway-lab bench apiserver

demo: root ## five published experiments beside kube-proxy in quick form, with a report (as root; 5 minutes)
	@$(MAKE) --no-print-directory -j build demo-packages demo-kube-proxy
	bin/spillway-lab lab run all --quick

# At once: one downloads while another compiles.
.PHONY: demo-packages demo-kube-proxy
demo-packages:
	hack/deps demo
demo-kube-proxy:
	hack/peers kube-proxy >/dev/null
