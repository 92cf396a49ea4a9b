package path

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// The NodePorts and the pods of node0 that the designs use: a rule of one must not match the
// packets of another.
const (
	filesNodePort    = 30069
	natPort          = 30090
	untrackedPod     = 1 // of natPort too: rules are loaded one design at a time
	untrackedPort    = 30091
	forwardedPod     = 2
	forwardedPort    = 30092
	designFullRounds = 4 // filling the table takes seconds
)

// natRules is the least that serves a NodePort by NAT: what the agent's rules add to it is
// the most that better rules can save.
const natRules = `
table ip spillway-lab-design {
	ct helper tftp { type "tftp" protocol udp; }
	chain prerouting {
		type nat hook prerouting priority dstnat - 1;
		ip daddr %[1]s tcp dport %[3]d dnat to %[2]s:80
		ip daddr %[1]s udp dport %[3]d ct helper set "tftp" dnat to %[2]s:69
	}
}
`

// untrackedRules is a NodePort whose packets are not tracked. Rules translate each packet
// and remember a transfer's addresses. The source cannot change before the routing
// decision: the kernel drops a packet that arrives with an address of its own. %[1]s is the
// node's address, %[2]s the pod's, %[3]d the NodePort.
const untrackedRules = `
table ip spillway-lab-design {
	map requests { typeof ip daddr . udp dport : ip saddr; size 65536; flags dynamic,timeout; timeout 30s; }
	map transfers { typeof ip saddr . udp sport . udp dport : ip daddr; size 65536; flags dynamic,timeout; timeout 30s; }
	chain prerouting {
		type filter hook prerouting priority raw;
		ip saddr %[2]s notrack accept
		iifname eth0 ip daddr %[1]s tcp dport %[3]d notrack ip daddr set jhash ip saddr . tcp sport mod 1 map { 0 : %[2]s } tcp dport set 80 accept
		iifname eth0 ip daddr %[1]s udp dport %[3]d notrack update @requests { ip saddr . udp sport : ip daddr } ip daddr set jhash ip saddr . udp sport mod 1 map { 0 : %[2]s } udp dport set 69 accept
		iifname eth0 ip daddr %[1]s ip daddr set ip saddr . udp sport . udp dport map @transfers notrack
	}
	chain postrouting {
		type filter hook postrouting priority raw;
		oifname eth0 ip saddr %[2]s tcp sport 80 ip saddr set %[1]s tcp sport set %[3]d
		oifname eth0 ip saddr %[2]s ip protocol udp goto answer
	}
	chain answer {
		update @transfers { ip daddr . udp dport . udp sport : ip saddr }
		ip saddr set ip daddr . udp dport map @requests
	}
}
`

// forwardedRules is the same before the stack: rules at a device's ingress translate and
// send the packet to the next device. They know the one client, %[4]s: nft has no lookup of
// a next hop. %[5]s is the pod's device.
const forwardedRules = `
table netdev spillway-lab-design {
	map requests { typeof ip daddr . udp dport : ip saddr; size 65536; flags dynamic,timeout; timeout 30s; }
	map transfers { typeof ip saddr . udp sport . udp dport : ip daddr; size 65536; flags dynamic,timeout; timeout 30s; }
	chain eth0 {
		type filter hook ingress device eth0 priority 0;
		ip daddr %[1]s tcp dport %[3]d ip daddr set jhash ip saddr . tcp sport mod 1 map { 0 : %[2]s } tcp dport set 80 fwd ip to %[2]s device cni0
		ip daddr %[1]s udp dport %[3]d update @requests { ip saddr . udp sport : ip daddr } ip daddr set jhash ip saddr . udp sport mod 1 map { 0 : %[2]s } udp dport set 69 fwd ip to %[2]s device cni0
		ip daddr %[1]s ip daddr set ip saddr . udp sport . udp dport map @transfers fwd ip to %[2]s device cni0
	}
	chain pod {
		type filter hook ingress device %[5]s priority 0;
		ip saddr %[2]s tcp sport 80 ip saddr set %[1]s tcp sport set %[3]d fwd ip to %[4]s device eth0
		ip saddr %[2]s ip protocol udp goto answer
	}
	chain answer {
		update @transfers { ip daddr . udp dport . udp sport : ip saddr }
		ip saddr set ip daddr . udp dport map @requests fwd ip to %[4]s device eth0
	}
}
`

// runDesigns compares what could translate a NodePort's packets by nftables.
func runDesigns(ctx context.Context, cfg Config, report *Report) error {
	if err := harness.NeedPrograms(map[string]string{"conntrack": "conntrack"}); err != nil {
		return err
	}
	b := &bench{cfg: cfg, saturation: map[load.Kind]float64{}, report: report}
	spec := topology.DefaultSpec(cfg.Name)
	// Without masquerading, as for files: metal and the pod's address need none.
	spec.Conntrack, spec.Clients = true, 1
	return b.run(ctx, spec, designPlans)
}

// designPlans compares each design with metal. The pod's address is the limit of those
// that send packets through the stack.
func designPlans(c *topology.Cluster) (out []plan) {
	client, node := c.Client(0), c.Node(0)
	to := func(addr netip.Addr, port uint16) way { return way{client, netip.AddrPortFrom(addr, port)} }
	rules := func(text string, pod, port int) string {
		p := c.Pod(0, pod)
		return fmt.Sprintf(text, node.IPv4, p.IPv4, port, client.IPv4, p.NodeDevice)
	}
	for _, kind := range []load.Kind{load.TFTP, load.Conn} {
		metal, pod, here := to(node.IPv4, metalPort), to(c.Pod(0, 0).IPv4, podPort), to(node.IPv4, hereNodePort)
		if kind == load.TFTP {
			metal, pod, here = to(node.IPv4, metalTFTPPort), to(c.Pod(0, 0).IPv4, tftpPort), to(node.IPv4, filesNodePort)
		}
		designs := []plan{
			{name: "pod address ÷ metal", service: pod, control: true},
			{name: "NodePort, the agent's rules ÷ metal", service: here},
			{name: "NodePort, one rule of NAT ÷ metal", service: to(node.IPv4, natPort), rules: rules(natRules, untrackedPod, natPort)},
			{name: "NodePort, untracked ÷ metal", service: to(node.IPv4, untrackedPort), rules: rules(untrackedRules, untrackedPod, untrackedPort)},
			{name: "NodePort, forwarded at ingress ÷ metal", service: to(node.IPv4, forwardedPort),
				rules: rules(forwardedRules, forwardedPod, forwardedPort)},
		}
		for _, full := range []bool{false, true} {
			for i, p := range designs {
				if full && i != 1 && i < 3 {
					continue // conntrack stops them as it stops the agent's
				}
				p.kind, p.base, p.full = kind, metal, full
				p.control = p.control && !full
				p.baseServer, p.server = node, c.Pod(0, 0)
				out = append(out, p)
			}
		}
	}
	return out
}

// setUpDesigns starts all servers and an agent on node0, and waits until every target
// answers that needs no rules.
func (b *bench) setUpDesigns(ctx context.Context, plans []plan) error {
	c := b.harness.Cluster
	b.cfg.Progress.Step("starting servers and an agent on node0")
	serve := func(host *topology.Host, web, files uint16) error {
		return errors.Join(b.harness.Serve(ctx, host, workload.HTTP, web), b.harness.Serve(ctx, host, workload.Blocks, files))
	}
	if err := serve(c.Node(0), metalPort, metalTFTPPort); err != nil {
		return err
	}
	for _, pod := range []int{0, untrackedPod, forwardedPod} {
		if err := serve(c.Pod(0, pod), podPort, tftpPort); err != nil {
			return err
		}
	}
	if err := b.harness.RoutePods(c.Client(0)); err != nil {
		return err
	}
	text, err := designManifests(c)
	if err != nil {
		return err
	}
	if _, err := b.harness.WriteFile("manifests/bench.yaml", text); err != nil {
		return err
	}
	if err := b.harness.Agent(ctx, c.Node(0), b.harness.Path("manifests"), b.cfg.Mode); err != nil {
		return err
	}
	for _, p := range plans {
		for _, w := range []way{p.base, p.service} {
			if w == p.service && p.rules != "" {
				continue
			}
			if err := b.waitAnswerOf(ctx, p.kind, w); err != nil {
				return err
			}
		}
	}
	return nil
}

// designManifests returns the Node objects, and a Service of each protocol with a pod of
// node0.
func designManifests(c *topology.Cluster) ([]byte, error) {
	nodes, err := c.NodesYAML()
	if err != nil {
		return nil, err
	}
	out := strings.Builder{}
	out.Write(nodes)
	for _, o := range []any{
		service("web", hereClusterIP, hereNodePort, podPort, corev1.ProtocolTCP), slice("web", c.Pod(0, 0), podPort, corev1.ProtocolTCP),
		service("files", thereClusterIP, filesNodePort, tftpPort, corev1.ProtocolUDP), slice("files", c.Pod(0, 0), tftpPort, corev1.ProtocolUDP),
	} {
		text, err := yaml.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("write manifest: %w", err)
		}
		fmt.Fprintf(&out, "---\n%s", text)
	}
	return []byte(out.String()), nil
}

// withRules loads nft rules on node0 before each measurement and deletes them after it.
func (b *bench) withRules(rules string, measure experiment.Arm[harness.Sample]) experiment.Arm[harness.Sample] {
	if rules == "" {
		return measure
	}
	table, _, _ := strings.Cut(strings.TrimSpace(rules), " {")
	return func(ctx context.Context) (s harness.Sample, err error) {
		if err := b.nft(ctx, rules); err != nil {
			return s, err
		}
		defer func() { err = errors.Join(err, b.nft(context.WithoutCancel(ctx), "delete "+table)) }()
		return measure(ctx)
	}
}

func (b *bench) nft(ctx context.Context, text string) error {
	cmd := b.harness.Cluster.Node(0).Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("load nft rules: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}
