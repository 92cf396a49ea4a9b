package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	corev1 "k8s.io/api/core/v1"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
)

// spillway runs a command against the agent of a node, and returns what it prints.
func (e *env) spillway(t *testing.T, node string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), await.Limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, e.Binary, append(args, "--api-socket", e.Agent(node).Socket())...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("spillway %q: %v: %s", args, err, &errs)
	}
	return out.String()
}

// shownService is what `spillway services NAME -o json` prints of a Service.
type shownService struct {
	Service struct {
		Ports []struct {
			Family, Protocol string
			Compared         bool
			Differences      []string
			Endpoints        []struct {
				Address, Pod, Node string
				Port               int
				Ready, InUse       bool
			}
		}
	}
}

func (e *env) shown(t *testing.T, node, name string) (s shownService) {
	t.Helper()
	if err := json.Unmarshal([]byte(e.spillway(t, node, "services", name, "-o", "json")), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// used returns the addresses of the endpoints of IPv4 and TCP that are in use and that are
// not, and the differences of that port.
func (s shownService) used() (yes, no, differences []string) {
	for _, p := range s.Service.Ports {
		if p.Family != "IPv4" || p.Protocol != "tcp" {
			continue
		}
		for _, e := range p.Endpoints {
			if e.InUse {
				yes = append(yes, e.Address)
			} else {
				no = append(no, e.Address)
			}
		}
		differences = append(differences, p.Differences...)
	}
	return yes, no, differences
}

// TestAPIShowsPlantedFaults: a dead endpoint, and an entry of a map that another program has
// changed. Two agents share the machine's file system, and each answers for its own node.
func TestAPIShowsPlantedFaults(t *testing.T) {
	e := start(t, "e2e-api")
	s := e.Load(t, nodePort("a0", "b0"))
	name := e.nameOf(t, s.Scope.Namespace)
	for _, node := range e.Nodes() {
		var status struct{ Node, ProxyMode string }
		if err := json.Unmarshal([]byte(e.spillway(t, node, "status", "-o", "json")), &status); err != nil || status.Node != e.NodeName(node) ||
			status.ProxyMode != e.ModeOf(node) {
			t.Errorf("status of node %s: %+v, %v", node, status, err)
		}
	}
	a0, b0 := e.Addr("a0", false).String(), e.Addr("b0", false).String()
	if yes, no, differences := e.shown(t, "a", name).used(); len(yes) != 2 || len(no)+len(differences) > 0 {
		t.Fatalf("a healthy Service: used %v, not used %v, differences %q", yes, no, differences)
	}
	e.wantFlow(t, s.MustAddress(t, flows.NodePort("a"), flows.TCP4), name)

	s.MustWrite(t, flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: append(flows.On("a0"), flows.NotReady("b0")...)})
	s.MustWait(t)
	if yes, no, _ := e.shown(t, "a", name).used(); !slices.Equal(yes, []string{a0}) || !slices.Equal(no, []string{b0}) {
		t.Errorf("with a dead endpoint: used %v, not used %v", yes, no)
	}

	if e.ModeOf("a") == "ebpf" {
		port := changeEndpoint(t, e.Agent("a").BPFFS, e.Addr("a0", false))
		_, _, differences := e.shown(t, "a", name).used()
		if want := fmt.Sprintf("endpoint %s: eBPF map backends has %s:1, not %[1]s", netip.AddrPortFrom(e.Addr("a0", false), port),
			a0); !slices.Equal(differences, []string{want}) {
			t.Errorf("with a changed entry: differences %q, want %q", differences, want)
		}
		if text := e.spillway(t, "a", "services", name); !strings.Contains(text, "differences: the kernel does not hold what is wanted") {
			t.Errorf("the text does not end with it:\n%s", text)
		}
		if _, _, differences := e.shown(t, "b", name).used(); len(differences) > 0 {
			t.Errorf("the other node shows %q", differences)
		}
	}

	// A killed agent leaves its socket. The next one replaces it, and repairs the map.
	e.restart(t, "a", syscall.SIGKILL)
	e.waitReady(t)
	s.MustWait(t)
	if yes, _, differences := e.shown(t, "a", name).used(); !slices.Equal(yes, []string{a0}) || len(differences) > 0 {
		t.Errorf("after a restart: used %v, differences %q", yes, differences)
	}
}

// nameOf returns the Service of a namespace that has NodePorts.
func (e *env) nameOf(t *testing.T, namespace string) string {
	t.Helper()
	var list struct {
		Services []struct{ Namespace, Name, Type string }
	}
	if err := json.Unmarshal([]byte(e.spillway(t, "a", "services", "-n", namespace, "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	for _, s := range list.Services {
		if s.Type == "NodePort" && s.Namespace == namespace {
			return namespace + "/" + s.Name
		}
	}
	t.Fatalf("no Service with NodePorts: %+v", list)
	return ""
}

// wantFlow opens a connection through a NodePort, and wants the flow table of node a to name
// its Service.
func (e *env) wantFlow(t *testing.T, dst, service string) {
	t.Helper()
	if e.ModeOf("a") != "ebpf" {
		return // netfilter keeps the connections
	}
	ask(t, e.MustProbe(t, "client0"), dst, flows.TCP4, 1)
	namespace, name, _ := strings.Cut(service, "/")
	resp, err := nodeclient.New(nodeclient.Unix(e.Agent("a").Socket())).ListFlows(t.Context(),
		&nodev1alpha1.ListFlowsRequest{Filter: &nodev1alpha1.FlowFilter{Namespace: namespace, Service: name,
			Address: e.Addr("client0", false).String()}})
	if err != nil || len(resp.Flows) == 0 || resp.Flows[0].Endpoint.Pod == "" || resp.Flows[0].State == "" {
		t.Errorf("flows of %s: %v, %v", service, resp, err)
	}
}

// changeEndpoint gives the entries of an address port 1 in the map of endpoints, as a program
// that writes to the wrong map would. It returns the port that was there.
func changeEndpoint(t *testing.T, bpffs string, addr netip.Addr) (was uint16) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(bpffs, "maps-v*", "backends"))
	if err != nil || len(found) != 1 {
		t.Fatalf("maps of endpoints: %v, %v", found, err)
	}
	m, err := ebpf.LoadPinnedMap(found[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	// struct backend of bpf/abi.h: an address of 16 bytes, and a port in network order.
	const port = 16
	changed := map[string][]byte{}
	var key, value []byte
	for entries := m.Iterate(); entries.Next(&key, &value); {
		if bytes.Equal(value[:4], addr.AsSlice()) && value[port+2] == 4 {
			was = binary.BigEndian.Uint16(value[port:])
			changed[string(key)] = binary.BigEndian.AppendUint16(bytes.Clone(value[:port]), 1)
			changed[string(key)] = append(changed[string(key)], value[port+2:]...)
		}
	}
	for key, value := range changed {
		if err := m.Put([]byte(key), value); err != nil {
			t.Fatal(err)
		}
	}
	if len(changed) == 0 {
		t.Fatalf("no entry of %s", addr)
	}
	return was
}
