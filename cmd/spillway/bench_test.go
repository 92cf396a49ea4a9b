package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/lab/load"
)

func TestLabCommandLinesThatAreWrong(t *testing.T) {
	tests := []struct{ args, want string }{
		{"bench", "no benchmark given"},
		{"bench path --modes ipvs", `mode "ipvs"`},
		{"bench path --modes ebpf,nftables", "one mode at a time"},
		{"bench path --rounds 0", "rounds is 0"},
		{"bench path -o yaml", `"yaml"`},
		{"demo --rounds 100", "the demo ends within"},
		{"demo -o yaml", `"yaml"`},
		{"load http 10.0.0.1", `target "10.0.0.1"`},
		{"load http 10.0.0.1:80 --source x", `--source "x"`},
		{"load udp 10.0.0.1:80 --connections 0", "connections is 0"},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			var out, errs strings.Builder
			code := run(strings.Fields(tt.args), &out, &errs)
			if code != exitUsage || !strings.Contains(errs.String(), tt.want) {
				t.Errorf("exit code %d, %q; want %d and %q", code, errs.String(), exitUsage, tt.want)
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
	args := []string{"load", "http", target, "--connections", "2", "--warmup", "0s", "--max-requests", "10", "--path", "/x"}
	if code := run(args, &out, &errs); code != exitDone {
		t.Fatalf("exit code %d: %s", code, errs.String())
	}
	var r load.Result
	if err := json.Unmarshal([]byte(out.String()), &r); err != nil {
		t.Fatal(err)
	}
	if r.Requests != 10 || r.Failed() != 0 || r.Target != target || r.Kind != load.HTTP {
		t.Errorf("result is %+v", r)
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
	for _, args := range []string{"demo", "bench path"} {
		var out, errs strings.Builder
		code := run(strings.Fields(args), &out, &errs)
		if want := "spillway: lab needs root: run with sudo\n"; code != exitFailed || errs.String() != want {
			t.Errorf("%s: exit code %d, %q; want %d and %q", args, code, errs.String(), exitFailed, want)
		}
	}
}
