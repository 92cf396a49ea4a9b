package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/lab/load"
)

func TestLabCommandLinesThatAreWrong(t *testing.T) {
	tests := []struct{ args, want string }{
		{"bench pth", `unknown command "pth" (did you mean path?)`},
		{"bench path --modes ipvs", `mode "ipvs"`},
		{"bench path --modes ebpf,nftables", "one mode at a time"},
		{"bench path --rounds 0", "rounds is 0"},
		{"bench path --only (", "--only: error parsing regexp"},
		{"bench path -o xml", `"xml"`},
		{"bench end-to-end --rounds 0", "rounds is 0"},
		{"bench end-to-end --name a-name-too-long", "at most 14 characters"},
		{"bench api --modes iptables", `mode "iptables": not a mode: use ebpf`},
		{"bench api --services 0", "services is 0"},
		{"bench api --rate 10 --probes 11", "probes is 11: use 1 to the rate, 10"},
		{"bench api --duration 1ms", "duration is 1ms"},
		{"demo --rounds 100", "the demo ends within"},
		{"demo -o xml", `"xml"`},
		{"lab exec", "lab exec: no host and no command given: write lab exec --name CLUSTER HOST -- COMMAND"},
		{"lab exec node0", "lab exec: no command given to run on node0: write lab exec --name lab node0 -- COMMAND"},
		{"lab exec --name x node0 --", "lab exec --name x node0 -- COMMAND"},
		{"lab nodes a --name b", "lab nodes a and --name: give one of them"},
		{"lab nodes a b", `one argument too many: "b"`},
		{"lab nodes a/b", `cluster "a/b": not a DNS label`},
		{"lab down --name a/b", `--name "a/b": not a DNS label of at most 20 characters`},
		{"lab status --name A", `--name "A": not a DNS label`},
		{"lab up --external-ranges x", `lab up: "x" is not an address prefix`},
		{"lab ask ftp 10.0.0.1:80", `kind "ftp" is none of`},
		{"lab ask tcp 10.0.0.1", `ask "10.0.0.1": write ADDRESS:PORT`},
		{"lab ask tcp 10.0.0.1:80 --from x", `ask from "x": write ADDRESS:PORT`},
		{"lab report", "no RESULTS.json given"},
		{"bench sync --services 5,a", `--services "5,a": a list of whole numbers such as 1,20 is expected`},
		{"bench path --name A", `--name "A": not a DNS label`},
		{"demo --name A", `--name "A": not a DNS label`},
		{"load http 10.0.0.1", `target "10.0.0.1"`},
		{"load http 10.0.0.1:80 --source x", `--source "x"`},
		{"load udp 10.0.0.1:80 --connections 0", "connections is 0"},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			var out, errs strings.Builder
			code := run(strings.Fields(tt.args), &out, &errs)
			if code != cli.ExitUsage || !strings.Contains(errs.String(), tt.want) {
				t.Errorf("exit code %d, %q; want %d and %q", code, errs.String(), cli.ExitUsage, tt.want)
			}
		})
	}
}

func TestLoadPrintsJSON(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/x" {
			w.WriteHeader(http.StatusNotFound)
		}
		fmt.Fprint(w, "hello")
	}))
	defer server.Close()
	var out, errs strings.Builder
	target := server.Listener.Addr().String()
	args := []string{"load", "http", target, "-o", "json", "--connections", "2", "--warmup", "0s", "--max-requests", "10", "--path", "/x"}
	if code := run(args, &out, &errs); code != cli.ExitDone {
		t.Fatalf("exit code %d: %s", code, errs.String())
	}
	var r load.Result
	if err := json.Unmarshal([]byte(out.String()), &r); err != nil {
		t.Fatal(err)
	}
	if r.Requests != 10 || r.Failed() != 0 || r.Target != target || r.Kind != load.HTTP {
		t.Errorf("result is %+v", r)
	}
	out.Reset()
	args[4] = "table"
	if code := run(args, &out, &errs); code != cli.ExitDone || !strings.Contains(out.String(), "10 answered in ") ||
		!strings.Contains(out.String(), "p99.9") {
		t.Errorf("exit code %d: %s%s", code, out.String(), errs.String())
	}
}

func TestLoadWithoutAnAnswerFails(t *testing.T) {
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	target := silent.LocalAddr().String()
	for _, kind := range []string{"http", "udp", "dns", "tftp"} {
		var out, errs strings.Builder
		// No TCP server listens; a UDP server does, and does not answer.
		code := run([]string{"load", kind, target, "--duration", "100ms", "--warmup", "0s", "--connections", "3"}, &out, &errs)
		if code != cli.ExitFailed || !strings.Contains(errs.String(), "no request was answered") {
			t.Errorf("%s: exit code %d: %s", kind, code, errs.String())
		}
		if !strings.Contains(out.String(), "latency: none measured") ||
			kind != "http" && !strings.Contains(out.String(), "unanswered at the end: 3") {
			t.Errorf("%s prints:\n%s", kind, out.String())
		}
	}
	for _, args := range []string{"http --rate NaN", "udp --rate 1e9", "tftp --delay 1s", "tftp --path /x",
		"udp --any-status", "memcached --body x"} {
		var out, errs strings.Builder
		if code := run(append([]string{"load", strings.Fields(args)[0], target}, strings.Fields(args)[1:]...), &out,
			&errs); code != cli.ExitUsage {
			t.Errorf("%s: exit code %d: %s", args, code, errs.String())
		}
	}
}

func TestExperimentsAskForRootBeforeTheySayThatTheyBuild(t *testing.T) {
	if os.Geteuid() == 0 {
		if err := syscall.Seteuid(65534); err != nil { // the whole process: Go sees to all threads
			t.Fatal(err)
		}
		defer func() {
			if err := syscall.Seteuid(0); err != nil {
				t.Fatal(err)
			}
		}()
	}
	for _, args := range []string{"demo", "bench path", "bench api"} {
		var out, errs strings.Builder
		code := run(strings.Fields(args), &out, &errs)
		if want := "spillway-lab: make network namespaces: not root: run it as root\n"; code != cli.ExitFailed || errs.String() != want {
			t.Errorf("%s: exit code %d, %q; want %d and %q", args, code, errs.String(), cli.ExitFailed, want)
		}
	}
}
