package agent

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	nodeapi "spillway.dev/spillway/internal/observe/server"
	"spillway.dev/spillway/test/await"
)

func TestAPIFlags(t *testing.T) {
	files := " --api-tls-cert=c --api-tls-key=k --api-client-ca=a"
	for args, want := range map[string]string{
		"":                          "",
		"--api-socket=":             "",
		"--api-socket=run/api.sock": `--api-socket "run/api.sock": must be an absolute path`,
		"--api-socket=/" + strings.Repeat("d", 107): "too long for a Unix socket",
		"--api-listen=127.0.0.1:1": "--api-listen without mTLS is not served: give --api-tls-cert, --api-tls-key " +
			"and --api-client-ca too",
		"--api-listen=:1 --api-tls-cert=c --api-tls-key=k": "--api-listen without mTLS is not served",
		"--api-listen=:1" + files:                          "",
		"--api-listen=x:y" + files:                         "--api-listen",
		"--api-client-ca=a":                                "are for --api-listen: give it too, or none of them",
	} {
		_, err := withFlags(t, strings.Fields(args)...)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n")) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

// TestEachInstanceHasASocketOfItsOwn, unless a socket is given.
func TestEachInstanceHasASocketOfItsOwn(t *testing.T) {
	sockets := map[string]string{}
	for args, want := range map[string]string{
		"":                                      nodeclient.DefaultSocket,
		"--bpffs=/mnt/a":                        "/run/spillway/",
		"--bpffs=/mnt/b":                        "/run/spillway/",
		"--api-socket=/x/y":                     "/x/y",
		"--api-socket=":                         "",
		"--api-socket=/x/z " + "--bpffs=/mnt/c": "/x/z",
	} {
		c, err := withFlags(t, strings.Fields(args)...)
		if err != nil {
			t.Fatal(err)
		}
		got := c.API.socket("/run/spillway", c.EBPF.BPFFS)
		if !strings.HasPrefix(got, want) || (want == "") != (got == "") {
			t.Errorf("%q: socket %q, want %q", args, got, want)
		}
		if other, ok := sockets[got]; ok {
			t.Errorf("%q and %q have one socket: %s", args, other, got)
		}
		sockets[got] = args
	}
}

// TestTheAgentServesItsAPI, and a path that another program has is a Problem and no exit.
func TestTheAgentServesItsAPI(t *testing.T) {
	m := &memory{ports: map[intent.PortID]*intent.ServicePort{}}
	a := testAgent(t, m)
	a.cfg.API.Socket = nodeclient.DefaultSocket
	writeService(t, a.cfg.Manifests, "web", "10.96.0.1")
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.run(ctx) }()
	socket := a.cfg.API.socket(a.lockDir, a.cfg.EBPF.BPFFS)
	client := nodeclient.New(nodeclient.Unix(socket))
	await.True(t, "the API has the Service", func() bool {
		resp, err := client.GetService(ctx, &nodev1alpha1.GetServiceRequest{Namespace: "default", Name: "web"})
		return err == nil && resp.Service.Ports[0].Dataplane == "ebpf"
	})
	status, err := client.Status(ctx, &nodev1alpha1.StatusRequest{})
	if err != nil || status.Node != "n1" || status.Sync.Services != 1 || status.ProxyMode != "ebpf" {
		t.Errorf("status %v, %v", status, err)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(socket); err == nil {
		t.Error("the socket is left")
	}

	other := testAgentOn(a)
	other.cfg.API.Socket = filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(other.cfg.API.Socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, stop = context.WithCancel(t.Context())
	go func() { done <- other.run(ctx) }()
	await.True(t, "the Service is written again", func() bool { return m.count() == 1 })
	stop()
	if err := <-done; err != nil {
		t.Errorf("an agent whose socket cannot be made ends with %v", err)
	}
}

// Metrics and Events have findings whether or not the API is served.
func TestWithoutAPIThereAreFindings(t *testing.T) {
	a := testAgent(t, nil)
	run, err := a.newAPI(nil, &kernelParts{}, nil, nodeapi.NewFindings(nil), slog.New(slog.NewTextHandler(io.Discard, nil)))
	if run == nil || err != nil {
		t.Errorf("no part: %v", err)
	}
}

func TestFindingsAboutServicesAreReported(t *testing.T) {
	var got []string
	in := &input{finding: func(service model.Name, id, title string) { got = append(got, service.String()+" "+id+" "+title) }}
	of := func(id string, s doctor.Severity, o doctor.Object) {
		in.findingBegan(doctor.Finding{ID: id, Severity: s, Title: "text", Object: o})
	}
	of("endpoint-refuses", doctor.Critical, doctor.Object{Kind: "Service", Namespace: "shop", Name: "web", Port: "http"})
	of("endpoint-refuses", doctor.Critical, doctor.Object{Kind: "Pod", Namespace: "shop", Name: "web-0"})
	of("source-range-refuses", doctor.Info, doctor.Object{Kind: "Service", Namespace: "shop", Name: "web"})
	of("rules-many", doctor.Warning, doctor.Object{Kind: "Node"})
	if want := []string{"shop/web endpoint-refuses text", "shop/pod/web-0 endpoint-refuses text"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
	(&input{}).findingBegan(doctor.Finding{Object: doctor.Object{Kind: "Service"}}) // from files: reported nowhere
}
