package life

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/cluster/images"
	"spillway.dev/spillway/test/cluster/programs"
	"spillway.dev/spillway/test/flows/probe"
)

// The pages of docs whose commands and manifests dsrReplies uses.
const (
	announcePage = "how-to/announce-addresses.md"
	keepPage     = "how-to/keep-client-addresses.md"
)

// announced is the Service web of docs/how-to/announce-addresses.md, whose addresses MetalLB announces
// on the nodes' network. The peers are its endpoints.
type announced struct {
	*cluster.Cluster
	addresses []netip.AddrPort // of the load balancer, for each family
	nodePorts []netip.AddrPort // of node2
	load      *load            // of the Service
}

// dsrReplies has MetalLB announce a Service at node2, whose endpoints are on other nodes. They see
// the client's address, and connections go on when the secret changes, when node2's agent is killed, and
// when the addresses move to another node.
func dsrReplies(t *testing.T, c *cluster.Cluster, l *load) {
	dir, err := programs.Build(t.Context(), t.Output(), "helm", "kubectl")
	clustertest.Must(t, err)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	a := &announced{Cluster: c, load: &load{probes: l.probes, servers: l.servers}}
	defer a.remove(t)
	defer a.load.end(t)
	for _, step := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"node's address", a.createService},
		{"switched on", a.switchOn},
		{"MetalLB announces", a.announce},
		{"secret changed", a.changeSecret},
		{"SIGKILL of the agent", a.killAgent},
		{"addresses moved", a.moveAddresses},
		{"addresses of a node's device", a.moveOwnAddresses},
		{"cable cut", a.cutCable},
	} {
		if !t.Run(step.name, step.do) {
			return
		}
	}
}

// createService creates the Service, and installs MetalLB, which takes time to start. The next upgrades
// restart all agents at once, to save time.
func (a *announced) createService(t *testing.T) {
	clustertest.Must(t, a.InstallSpillway(t.Context(), "updateStrategy.rollingUpdate.maxUnavailable=100%"))
	install, _ := a.installMetalLB(t)
	a.shell(t, install)
	clustertest.Must(t, a.Apply(t.Context(), block(t, announcePage, "kind: Service", "app: web", "app: peer")))
	out := kubectl(t, a.Cluster, "--namespace=default", "get", "service/web", "--output=jsonpath={.spec.ports[0].nodePort}")
	port, err := strconv.ParseUint(out, 10, 16)
	clustertest.Must(t, err)
	for _, ip := range a.Node(2).Addresses() {
		a.nodePorts = append(a.nodePorts, netip.AddrPortFrom(ip, uint16(port)))
	}
	a.wantSources(t, false)
}

// installMetalLB returns the commands of the page: to install MetalLB from its module's manifest, and to
// wait for it.
func (a *announced) installMetalLB(t *testing.T) (install, wait string) {
	source, err := programs.Source(t.Context(), "metallb", "go.universe.tf/metallb")
	clustertest.Must(t, err)
	install, wait, _ = strings.Cut(block(t, announcePage, "metallb-native.yaml"), "\n")
	words := strings.Fields(install)
	words[len(words)-1] = filepath.Join(source, images.MetalLBManifest)
	return strings.Join(words, " "), wait
}

// switchOn gives the nodes their secret, and then switches DSR replies on.
func (a *announced) switchOn(t *testing.T) {
	a.shell(t, block(t, keepPage, "forwarding=hybrid", "deploy/helm", filepath.Join(root(t), "deploy/helm"),
		"NAMESPACE", "default", "NAME", "web"))
	clustertest.Must(t, a.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
	a.wantSources(t, true)
}

// announce has MetalLB assign the Service's addresses, and node2 announce them.
func (a *announced) announce(t *testing.T) {
	_, wait := a.installMetalLB(t)
	a.shell(t, wait)
	pool := block(t, announcePage, "kind: IPAddressPool", "192.0.2.", "172.30.0.", "2001:db8::", "fd30::")
	await.True(t, "MetalLB's webhook accepts the pool", func() bool { return a.Apply(t.Context(), pool) == nil })
	kubectl(t, a.Cluster, "--namespace=default", "wait", "service/web", "--for=jsonpath={.status.loadBalancer.ingress[1].ip}", "--timeout=1m")
	out := kubectl(t, a.Cluster, "--namespace=default", "get", "service/web", "--output=jsonpath={.status.loadBalancer.ingress[*].ip}")
	for _, ip := range strings.Fields(out) {
		a.addresses = append(a.addresses, netip.AddrPortFrom(netip.MustParseAddr(ip), 80))
	}
	a.wantAnnouncer(t, 2)
	a.wantSources(t, true)
}

// changeSecret restarts the agents node by node: they know different secrets meanwhile.
func (a *announced) changeSecret(t *testing.T) {
	helm(t, a.Cluster, "upgrade", "spillway", filepath.Join(root(t), "deploy/helm/spillway"), "--reuse-values",
		"--set", "updateStrategy.rollingUpdate.maxUnavailable=1")
	a.start(t, "early", 0)
	a.shell(t, block(t, keepPage, "rollout restart"))
	a.wantSources(t, true)
}

// killAgent kills the agent of node2, and waits for the next one.
func (a *announced) killAgent(t *testing.T) {
	pod := agents(t, a.Cluster)[a.Node(2).Name()]
	clustertest.Must(t, pod.Kill())
	await.True(t, "the agent is started again", func() bool {
		return kubectl(t, a.Cluster, "get", "pod", pod.Name,
			"--output=jsonpath={.status.containerStatuses[0].restartCount}{.status.containerStatuses[0].ready}") == "1true"
	})
	a.wantSources(t, true)
}

// moveAddresses moves them to node0, which has an endpoint, and back.
func (a *announced) moveAddresses(t *testing.T) {
	const drain = "node.kubernetes.io/exclude-from-external-load-balancers"
	a.shell(t, block(t, announcePage, drain, "NODE", a.Node(2).Name()))
	a.wantAnnouncer(t, 0)
	a.wantSources(t, true)
	a.start(t, "by node0", 0)
	kubectl(t, a.Cluster, "label", "node", a.Node(2).Name(), drain+"-")
	a.wantAnnouncer(t, 2)
	a.wantSources(t, true)
	a.load.end(t)
}

// moveOwnAddresses is a stand-in for kube-vip's ARP mode, which adds a Service's addresses to the device of
// one node and later of another. The client looks for its neighbors again, as after a gratuitous ARP.
func (a *announced) moveOwnAddresses(t *testing.T) {
	vip := &announced{Cluster: a.Cluster, load: a.load}
	clustertest.Must(t, a.Apply(t.Context(), block(t, announcePage, "kind: Service", "app: web", "app: peer", "name: web", "name: vip",
		"LoadBalancer", "LoadBalancer\n  loadBalancerClass: kube-vip.io/kube-vip-class")))
	kubectl(t, a.Cluster, "--namespace=default", "patch", "service/vip", "--subresource=status", "--type=merge",
		`--patch={"status": {"loadBalancer": {"ingress": [{"ip": "172.30.0.250"}, {"ip": "fd30::250"}]}}}`)
	defer kubectl(t, a.Cluster, "--namespace=default", "delete", "service/vip")
	for _, ip := range []string{"172.30.0.250", "fd30::250"} {
		vip.addresses = append(vip.addresses, netip.AddrPortFrom(netip.MustParseAddr(ip), 80))
	}
	vip.setOwner(t, 2)
	vip.wantSources(t, true)
	vip.start(t, "own", 0)
	vip.setOwner(t, 0)
	vip.wantSources(t, true)
	vip.wantNoDrops(t)
	vip.load.end(t)
}

// setOwner adds the addresses to the device of one node alone.
func (a *announced) setOwner(t *testing.T, node int) {
	t.Helper()
	script := ""
	for _, dst := range a.addresses {
		script += fmt.Sprintf("ip address $1 %s dev eth0 $2\n", dst.Addr())
	}
	for i, n := range a.AllNodes() {
		command := []string{"bash", "-c", script, "bash", "delete", ""}
		if i == node {
			command = []string{"bash", "-euc", script, "bash", "add", "nodad"}
		}
		if out, err := n.Host().Command(t.Context(), command...).CombinedOutput(); err != nil && i == node {
			t.Fatalf("set owner of %v: %v: %s", a.addresses, err, out)
		}
	}
	for _, dst := range a.addresses {
		clustertest.Must(t, a.Client().Command(t.Context(), "ip", "neigh", "flush", "to", dst.Addr().String()).Run())
	}
	a.wantAnnouncer(t, node)
}

// cutCable cuts node2 off until MetalLB has moved the addresses, and until connections had the time to
// go on.
func (a *announced) cutCable(t *testing.T) {
	a.start(t, "late", time.Minute)
	clustertest.Must(t, a.Node(2).SetCable(t.Context(), "down"))
	defer func() { clustertest.Must(t, a.Node(2).SetCable(context.Background(), "up")) }()
	cut := time.Now()
	a.wantAnnouncer(t, 0)
	moved := time.Since(cut)
	time.Sleep(moved + time.Second) // TCP doubles the time between two attempts
	t.Logf("the addresses moved %s after the cut", moved.Round(100*time.Millisecond))
}

// shell runs lines of a page with full rights.
func (a *announced) shell(t *testing.T, lines string) {
	t.Helper()
	shell(t, a.Cluster, cluster.Kubeconfig(a.Name), lines)
}

// remove leaves the chart's values to the next test, whose upgrade switches DSR replies off.
func (a *announced) remove(t *testing.T) {
	t.Helper()
	kubectl(t, a.Cluster, "--namespace=default", "delete", "service/web", "--ignore-not-found")
	kubectl(t, a.Cluster, "delete", "namespace/metallb-system", "--ignore-not-found", "--wait=false")
}

// wantAnnouncer waits until the client's neighbor tables have the node's address of the link layer.
func (a *announced) wantAnnouncer(t *testing.T, node int) {
	t.Helper()
	mac, err := a.Node(node).Command(t.Context(), "cat", "/sys/class/net/eth0/address").Output()
	clustertest.Must(t, err)
	for _, dst := range a.addresses {
		await.True(t, fmt.Sprintf("node%d announces %s", node, dst.Addr()), func() bool {
			// asks for the neighbor
			_ = a.Client().Command(t.Context(), "curl", "--silent", "--globoff", "--max-time", "1", "http://"+dst.String()).Run()
			out, err := a.Client().Command(t.Context(), "ip", "neigh", "show", dst.Addr().String()).Output()
			return err == nil && strings.Contains(string(out), strings.TrimSpace(string(mac)))
		})
	}
}

// sources returns the addresses from which the endpoint gets the client's connections. Their
// local ports are those of no other connection of the client.
func (a *announced) sources(t *testing.T, dst netip.AddrPort, times int) (seen []netip.Addr, err error) {
	t.Helper()
	script := `for ((i = 0; i < $2; i++)); do curl --silent --globoff --max-time 5 --local-port $3-$(($3 + 999)) http://$1/clientip; echo; done`
	port := 20000 // of another address of the Service
	if dst.Port() != 80 {
		port = 21000
	}
	out, err := a.Client().Command(t.Context(), "bash", "-euc", script, "bash", dst.String(), fmt.Sprint(times), fmt.Sprint(port)).Output()
	if err != nil {
		return nil, err
	}
	for _, field := range strings.Fields(string(out)) {
		source, err := netip.ParseAddrPort(field)
		if err != nil {
			return nil, err
		}
		seen = append(seen, source.Addr().Unmap())
	}
	return seen, nil
}

// wantSources expects that endpoints see the client's address, or another one, at the addresses of the
// load balancer and of node2.
func (a *announced) wantSources(t *testing.T, direct bool) {
	t.Helper()
	for _, dst := range slices.Concat(a.addresses, a.nodePorts) {
		await.True(t, fmt.Sprintf("%s is served", dst), func() bool {
			_, err := a.sources(t, dst, 1)
			return err == nil
		})
		seen, err := a.sources(t, dst, 10)
		clustertest.Must(t, err)
		for _, source := range seen {
			if own := a.Client().Addr(dst.Addr()); (source == own) != direct {
				t.Errorf("%s: the endpoint sees %s, the client is %s: DSR replies %v", dst, source, own, direct)
			}
		}
	}
}

// start starts connections that stay, and one after the other, with each address. An answer may take as
// long as given; 0 is the probe's own limit.
func (a *announced) start(t *testing.T, what string, within time.Duration) {
	t.Helper()
	for _, dst := range a.addresses {
		for i, proto := range []string{"new-tcp", "tcp", "tcp", "tcp", "tcp"} {
			a.load.streamPeer(t, "client0", probe.Request{
				Name: fmt.Sprintf("%s: %s %d to %s", what, proto, i, dst), Proto: proto, Dst: dst.String(),
				TimeoutMS: int(within.Milliseconds()), PauseMS: 50,
			})
		}
	}
}

// wantNoDrops expects that no node has dropped a SYN of another one, as with a secret that it does not
// know.
func (a *announced) wantNoDrops(t *testing.T) {
	t.Helper()
	for _, n := range a.AllNodes() {
		out, err := n.Command(t.Context(), "curl", "--silent", "http://127.0.0.1:10249/metrics").Output()
		clustertest.Must(t, err)
		if !strings.Contains(string(out), "\nspillway_ebpf_drops_total{reason=\"dsr\"} 0\n") {
			t.Errorf("%s has dropped SYNs with an option", n.Name())
		}
	}
}
