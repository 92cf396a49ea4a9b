package privilege

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

var measure = flag.String("measure", "", "comma-separated capabilities: log what each mode lacks with these and no others, and test "+
	"nothing else")

func TestMain(m *testing.M) {
	confineIfAsked()
	harness.Main(m, 4)
}

// mode is a dataplane with the variant of iptables that the node's other programs use.
type mode struct{ name, variant string }

// oneMode is the modes, or with -short the first of them.
func oneMode() []mode {
	if testing.Short() {
		return modes[:1]
	}
	return modes
}

func (m mode) String() string { return strings.TrimSuffix(m.name+"-"+m.variant, "-") }

var modes = []mode{{"ebpf", ""}, {"nftables", ""}, {"iptables", "legacy"}, {"iptables", "nft"}}

// node is a cluster of one node whose agent runs below a wrapper.
type node struct {
	*harness.Harness
	*wrapper
	inVain bool // a use is to fail
}

// clusters numbers the clusters of this package.
var clusters atomic.Int32

// newNode builds a cluster. It makes the test parallel: agents and tests mostly wait.
func newNode(t *testing.T, m mode, nodes int) *node {
	t.Helper()
	return newNodeWith(t, m, nodes, m.name)
}

// newNodeWith is newNode with the flags of other values of test/deploy.
func newNodeWith(t *testing.T, m mode, nodes int, values string) *node {
	t.Helper()
	t.Parallel()
	spec := topology.DefaultSpec(fmt.Sprint("privilege-", clusters.Add(1)))
	if spec.Nodes = nodes; nodes > 1 { // what the cases of test/flows name
		spec.PodsPerNode, spec.Clients, spec.Zones = 4, 2, []string{"east", "west"}
	}
	agent, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	w := newWrapper(t, agent)
	h := harness.Up(t, cluster.Config{Spec: spec, Binary: w.path, Mode: m.name, IptablesVariant: m.variant, Flags: flagsOf(t, values)})
	t.Cleanup(func() { w.confine(confinement{}) }) // before the cluster goes
	return &node{Harness: h, wrapper: w}
}

// restart ends the agent of node a, if it runs, and starts it in a mode.
func (n *node) restart(mode string, end syscall.Signal) error {
	a := n.Agent("a")
	if err := a.Signal(end); err != nil {
		return err
	}
	n.Mode = mode
	if err := a.Start(n.t.Context()); err != nil {
		return err
	}
	return n.ready()
}

// ready waits for the agent. One that a missing capability stops ends at once.
func (n *node) ready() error { return n.Agent("a").WaitReady(n.t.Context()) }

// patience returns how long a use waits: for inVain if it is to fail, since it can wait for
// nothing then, and otherwise for what a busy machine needs.
func (n *node) patience(inVain time.Duration) time.Duration {
	if n.inVain {
		return inVain
	}
	return 2 * time.Minute
}

// Names of uses.
const (
	start           = "start"
	findPodAddress  = "find a new address of a pod"
	removeLeftovers = "remove what the other modes left"
	useLegacy       = "use iptables-legacy where the node does"
	takeFlows       = "take over the flows of the eBPF dataplane"
)

// uses are the operations for which an agent needs capabilities. They run in order on
// one node, also after a failure; an error names the operation that failed.
var uses = []struct {
	name string
	only []string // modes; nil is all
	do   func(*node, mode) error
}{
	{start, nil, func(n *node, m mode) error { return n.restart(m.name, syscall.SIGTERM) }},
	{"serve Services", nil, serve},
	{"serve its API", nil, serveAPI},
	{"apply a do-not-track policy", nil, applyPolicy},
	{findPodAddress, []string{"ebpf"}, findAddress},
	{"restart after SIGKILL", nil, func(n *node, m mode) error { return n.restart(m.name, syscall.SIGKILL) }},
	{"repair removed pins", []string{"ebpf"}, repairPins},
	{useLegacy, []string{"iptables"}, legacyRules},
	{takeFlows, []string{"nftables", "iptables"}, takeOverFlows},
	{removeLeftovers, nil, removeOthers},
	{"log no complaint", nil, noComplaint},
	{"clean up", nil, cleanUp},
}

// try runs all uses, or only the named ones, and returns their errors by name.
func try(t *testing.T, m mode, c confinement, only ...string) map[string]error {
	t.Helper()
	return newNode(t, m, 1).try(t, m, c, only...)
}

// tryInVain is try for uses of which one is to fail. It does not wait long for that one.
func tryInVain(t *testing.T, m mode, c confinement, only ...string) map[string]error {
	t.Helper()
	n := newNode(t, m, 1)
	n.inVain = true
	return n.try(t, m, c, only...)
}

func (n *node) try(t *testing.T, m mode, c confinement, only ...string) map[string]error {
	t.Helper()
	n.confine(c)
	failed := map[string]error{}
	for _, use := range uses {
		if use.only != nil && !slices.Contains(use.only, m.name) || len(only) > 0 && !slices.Contains(only, use.name) {
			continue
		}
		begin := time.Now()
		err := use.do(n, m)
		t.Logf("%s: %v", use.name, time.Since(begin).Round(time.Millisecond))
		if err != nil {
			failed[use.name] = err
		}
		if err != nil && use.name == start {
			_ = n.Agent("a").Signal(syscall.SIGKILL) // the caller reports the failure
			break
		}
	}
	return failed
}

// serveAPI asks for everything that the API reads from the kernel. The first request may come
// before the socket is there.
func serveAPI(n *node, m mode) error {
	client := nodeclient.New(nodeclient.Unix(n.Agent("a").Socket()))
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	defer cancel()
	var status *nodev1alpha1.StatusResponse
	err := within(time.Minute, func() (err error) {
		status, err = client.Status(ctx, &nodev1alpha1.StatusRequest{})
		return err
	})
	if err != nil {
		return err
	}
	if m.name == "ebpf" && (len(status.Hooks) == 0 || len(status.Tables) < 2) {
		return fmt.Errorf("status has %d hooks and %d tables", len(status.Hooks), len(status.Tables))
	}
	services, err := client.ListServices(ctx, &nodev1alpha1.ListServicesRequest{})
	if err != nil {
		return err
	}
	for _, s := range services.Services {
		if _, err := client.GetService(ctx, &nodev1alpha1.GetServiceRequest{Namespace: s.Namespace, Name: s.Name}); err != nil {
			return err
		}
	}
	if _, err := client.ListFlows(ctx, &nodev1alpha1.ListFlowsRequest{}); err != nil {
		return err
	}
	if _, err := client.Drops(ctx, &nodev1alpha1.DropsRequest{}); err != nil {
		return err
	}
	_, err = client.Findings(ctx, &nodev1alpha1.FindingsRequest{})
	return err
}

func serve(n *node, _ mode) error {
	file := n.NewFile()
	if err := file.Write([]flows.Object{flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("a0")}}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(n.t.Context(), n.patience(20*time.Second))
	defer cancel()
	if err := file.Wait(ctx); err != nil {
		return err
	}
	for _, f := range []flows.Flow{
		{From: "a1", To: flows.ClusterIP}, {From: "a1/vm", To: flows.ClusterIP}, {From: "client0", To: flows.NodePort("a")},
	} {
		p, err := n.Probe(f.From)
		if err != nil {
			return err
		}
		for _, combo := range flows.AllCombos {
			dst, err := file.Address(f.To, combo)
			if err != nil {
				return err
			}
			resp, err := p.Do(ctx, probe.Request{Op: probe.Try, Proto: combo.Protocol(), Dst: dst, Tries: 2, TimeoutMS: 10_000})
			if err != nil {
				return err
			}
			for _, answer := range resp.Answers {
				if answer.Server != "a0" {
					return fmt.Errorf("%s to %s, %s: %+v", f.From, f.To, combo, answer)
				}
			}
		}
	}
	return nil
}

const policy = `
apiVersion: v1
kind: Namespace
metadata: {name: default}
---
apiVersion: v1
kind: Pod
metadata: {name: cache, namespace: default, labels: {role: cache}}
spec: {nodeName: %s}
status: {podIP: %s, podIPs: [{ip: %[2]s}]}
---
apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: cache}
spec:
  podSelector: {matchLabels: {role: cache}}
  ingress: [{ports: [{port: 11211}]}]
`

func applyPolicy(n *node, _ mode) error {
	if err := n.Agent("a").Write("policy.yaml", fmt.Appendf(nil, policy, n.NodeName("a"), n.Addr("a0", false))); err != nil {
		return err
	}
	return within(n.patience(10*time.Second), func() error {
		rules, err := n.run("nft", "list", "table", "inet", "spillway-policy")
		if err == nil && !strings.Contains(rules, "11211") {
			err = errors.New("the table of do-not-track policies lacks the port")
		}
		return err
	})
}

// findAddress gives a pod one more address, and the next one as soon as the agent knows that.
// An agent that hears the pod's namespace knows each within milliseconds, or seconds on a busy
// machine. Another agent knows it when it looks at everything again, after 30 s.
func findAddress(n *node, _ mode) error {
	const addresses, resync = 6, 30 * time.Second
	began := time.Now()
	for i := range addresses {
		if err := addAndFind(n, net.IPv4(10, 244, 0, byte(200+i)).To4()); err != nil {
			return err
		}
		if took := time.Since(began); took > (addresses-1)*resync {
			return fmt.Errorf("the agent knows %d addresses after %v only: it looks for them, and hears of none", i+1, took.Round(time.Second))
		}
	}
	return nil
}

func addAndFind(n *node, ip net.IP) error {
	pod, err := n.Host("a1")
	if err != nil {
		return err
	}
	if err := pod.Do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.AddrReplace(eth0, &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: net.CIDRMask(32, 32)}})
	}); err != nil {
		return err
	}
	return within(n.patience(20*time.Second), func() error {
		pins, err := filepath.Glob(filepath.Join(n.Agent("a").BPFFS, "*", "pods"))
		if err != nil || len(pins) != 1 {
			return fmt.Errorf("find the map of pods: %v %w", pins, err)
		}
		pods, err := ebpf.LoadPinnedMap(pins[0], nil)
		if err != nil {
			return err
		}
		defer pods.Close()
		var key, value []byte
		for entries := pods.Iterate(); entries.Next(&key, &value); {
			if strings.Contains(string(key), string(ip)) {
				return nil
			}
		}
		return fmt.Errorf("the agent does not know %v", ip)
	})
}

// repairPins removes the pins of programs on devices. The next agent takes over
// what is pinned and attaches the rest; none may be missing then.
func repairPins(n *node, m mode) error {
	links := filepath.Join(n.Agent("a").BPFFS, "links")
	before, err := os.ReadDir(links)
	if err != nil || len(before) == 0 {
		return errors.Join(errors.New("no programs are pinned"), err)
	}
	for _, pin := range before[:len(before)/2] {
		if err := os.Remove(filepath.Join(links, pin.Name())); err != nil {
			return err
		}
	}
	if err := n.restart(m.name, syscall.SIGTERM); err != nil {
		return err
	}
	after, err := os.ReadDir(links)
	if err == nil && len(after) != len(before) {
		err = fmt.Errorf("%d programs are pinned, before there were %d", len(after), len(before))
	}
	return err
}

// legacyRules looks where the rules are: the agent uses the node's variant of iptables,
// and the other one if it cannot.
func legacyRules(n *node, m mode) error {
	if m.variant != "legacy" {
		return nil
	}
	rules, err := n.run("iptables-legacy-save")
	if err == nil && !strings.Contains(rules, ":SPW") {
		err = errors.New("iptables-legacy-save shows no chain of Spillway")
	}
	return err
}

// takeOverFlows keeps connections open that the eBPF dataplane translates while the
// agent is started in this mode.
func takeOverFlows(n *node, m mode) error {
	n.release()
	defer n.restore()
	if err := n.restart("ebpf", syscall.SIGTERM); err != nil {
		return err
	}
	file := n.NewFile()
	if err := file.Write([]flows.Object{flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("a0")}}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(n.t.Context(), n.patience(30*time.Second))
	defer cancel()
	if err := file.Wait(ctx); err != nil {
		return err
	}
	p, err := n.Probe("client0")
	if err != nil {
		return err
	}
	dst, err := file.Address(flows.NodePort("a"), flows.AllCombos[0])
	if err != nil {
		return err
	}
	if _, err := p.Do(ctx, probe.Request{Op: probe.Stream, Name: "kept", Proto: "tcp", Dst: dst, PauseMS: 10}); err != nil {
		return err
	}
	n.restore()
	if err := n.restart(m.name, syscall.SIGTERM); err != nil {
		return err
	}
	time.Sleep(4 * time.Second) // the old dataplane is cleaned up after the first sync
	resp, err := p.Do(ctx, probe.Request{Op: probe.Stop, Name: "kept"})
	if err == nil && (resp.Report.Sent > resp.Report.Answered || resp.Report.Sent == 0) {
		err = fmt.Errorf("%d of %d questions were lost: %v", resp.Report.Sent-resp.Report.Answered, resp.Report.Sent, resp.Report.Lost)
	}
	return err
}

// removeOthers runs an agent of each other mode, with all rights, and this one after it.
func removeOthers(n *node, m mode) error {
	defer n.restore()
	for _, other := range modes {
		if other.name == m.name {
			continue
		}
		n.release()
		if err := n.plant(other); err != nil {
			return fmt.Errorf("run in mode %s with all rights: %w", other, err)
		}
		n.restore()
		if err := n.restart(m.name, syscall.SIGTERM); err != nil {
			return err
		}
		if err := within(n.patience(8*time.Second), func() error { return n.nothingOf(other.name) }); err != nil {
			return err
		}
	}
	return nil
}

// plant runs an agent of a mode until it serves.
func (n *node) plant(m mode) error {
	if m.variant != "" {
		n.IptablesVariant = m.variant
		rules := "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"
		for _, other := range []string{"legacy", "nft"} {
			for _, family := range []string{"iptables-", "ip6tables-"} {
				if _, err := n.run("sh", "-c", family+other+" -w -t mangle -X KUBE-KUBELET-CANARY || true"); err != nil {
					return err
				}
			}
		}
		if _, err := n.run("sh", "-c", "printf '"+strings.ReplaceAll(rules, "\n", `\n`)+"' | iptables-"+m.variant+
			"-restore --noflush --wait"); err != nil {
			return err
		}
	}
	if err := n.restart(m.name, syscall.SIGTERM); err != nil {
		return err
	}
	if n.nothingOf(m.name) == nil {
		return fmt.Errorf("nothing of it is in the kernel: the test is blind")
	}
	return nil
}

// nothingOf says what of a mode is in the kernel.
func (n *node) nothingOf(mode string) error {
	switch mode {
	case "ebpf":
		if _, err := os.Stat(n.Agent("a").BPFFS); !errors.Is(err, fs.ErrNotExist) {
			return errors.Join(errors.New("pins are left"), err)
		}
	case "nftables":
		if tables, err := n.run("nft", "list", "tables"); err != nil || strings.Contains(tables, "table inet spillway\n") {
			return errors.Join(errors.New("table inet spillway is left"), err)
		}
	case "iptables":
		for _, save := range []string{"iptables-legacy-save", "iptables-nft-save", "ip6tables-legacy-save", "ip6tables-nft-save"} {
			if rules, err := n.run(save); err != nil || strings.Contains(rules, ":SPW") {
				return errors.Join(fmt.Errorf("%s shows chains of Spillway", save), err)
			}
		}
	}
	return nil
}

// noComplaint looks through the agent's log.
func noComplaint(n *node, _ mode) error {
	log, err := os.ReadFile(n.Agent("a").Log)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "measure conntrack of ") && !strings.Contains(line, n.Spec.Name+"-") {
			continue // the namespace of another test's cluster, which ended meanwhile
		}
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") || strings.HasPrefix(line, "spillway: ") {
			return errors.New(strings.TrimSpace(line))
		}
	}
	return nil
}

func cleanUp(n *node, _ mode) error {
	if err := n.Agent("a").Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if err := n.Agent("a").Cleanup(n.t.Context()); err != nil {
		return err
	}
	for _, m := range modes {
		if err := n.nothingOf(m.name); err != nil {
			return err
		}
	}
	if tables, err := n.run("nft", "list", "tables"); err != nil || strings.Contains(tables, "spillway") {
		return errors.Join(fmt.Errorf("tables are left: %s", tables), err)
	}
	return nil
}

// run runs a command on the node with all rights.
func (n *node) run(argv ...string) (string, error) {
	host, err := n.Host("a")
	if err != nil {
		return "", err
	}
	out, err := host.Command(n.t.Context(), argv...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%v: %w: %s", argv, err, out)
	}
	return string(out), nil
}

// within repeats a check until it passes or time is up.
func within(limit time.Duration, check func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}
