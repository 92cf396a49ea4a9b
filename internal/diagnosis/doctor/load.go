package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/ruleset"
)

// Config says what to examine.
type Config struct {
	// Namespaces finds the network namespaces to examine, the caller's own first.
	Namespaces func() ([]conntrack.Namespace, error)
	Sample     time.Duration       // between two readings of the counters; 0: read them once
	Part       func(done, all int) // is called with the progress of Load; may be nil
	// Uses asks an agent which Service ports have UDP addresses. It returns as many as it
	// gets, at most usesAtOnce. May be nil: no agent is known.
	Uses  func(context.Context, []netip.AddrPort) ([]AddressUse, error)
	Hooks Hooks
}

// Hooks says what Spillway's socket hooks translate.
type Hooks struct {
	// Pod reports whether they translate connections of a process in a pod's network
	// namespace. Nil: there are no such hooks.
	Pod func(pid int) bool
	// Service reports whether they translate TCP connections of the node to an address. Nil:
	// there are no hooks.
	Service func(netip.AddrPort) bool
}

// usesAtOnce is the number of addresses that Uses gets at most.
const usesAtOnce = 512

// AddressUse is what an agent knows about an address. Service ports are namespace/name:port.
type AddressUse struct {
	Service    string   // that is served at the address; "": none
	EndpointOf []string // Service ports that have it as an endpoint; an agent names at most MostEndpointOf
}

// MostEndpointOf is how many Service ports of an endpoint an agent names: with so many, others may
// have it too.
const MostEndpointOf = 8

// Validate reports a missing or invalid value.
func (c Config) Validate() error {
	if c.Namespaces == nil {
		return errors.New("doctor: no network namespaces to examine")
	}
	if c.Sample < 0 {
		return fmt.Errorf("doctor: sample %v: must not be negative", c.Sample)
	}
	return nil
}

// othersTimeout bounds the reading of all namespaces but the caller's own: a pod makes as many as it
// likes, with as many rules. A node with 110 pods takes some seconds. A test shortens it.
var othersTimeout = 40 * time.Second

// Load reads the state of the node. A part that cannot be read is a Problem of the Node.
// It returns an error only if there is nothing to examine.
func Load(ctx context.Context, c Config) (*Node, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	l := loader{node: &Node{}, uses: c.Uses, hooks: c.Hooks}
	list, err := c.Namespaces()
	l.addProblem("", err)
	if len(list) == 0 {
		return nil, cmp.Or(err, errors.New("no network namespace to examine"))
	}
	l.machine(ctx)
	late := fmt.Errorf("network namespace was not read within %v", othersTimeout)
	others, cancel := context.WithTimeoutCause(ctx, othersTimeout, late)
	defer cancel()
	for i, n := range list {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if c.Part != nil {
			c.Part(i, len(list))
		}
		switch {
		case n.Own:
			l.namespace(ctx, n)
		case others.Err() == nil:
			l.namespace(others, n)
		default:
			l.addProblem(n.String(), late)
		}
	}
	if c.Sample > 0 {
		l.readCountersAgain(ctx, c.Sample)
	}
	return l.node, ctx.Err()
}

// loader fills a Node.
type loader struct {
	node  *Node
	began time.Time // when the first counters were read
	uses  func(context.Context, []netip.AddrPort) ([]AddressUse, error)

	hooks Hooks
}

// addProblem notes an error of reading. The same error in several namespaces is one
// Problem.
func (l *loader) addProblem(namespace string, err error) {
	if err == nil {
		return
	}
	what := strings.ReplaceAll(err.Error(), "\n", "; ")
	if namespace != "" {
		what = strings.ReplaceAll(what, "network namespace "+namespace, "network namespace")
	}
	i := slices.IndexFunc(l.node.Problems, func(p Problem) bool { return p.What == what })
	if i < 0 {
		i = len(l.node.Problems)
		l.node.Problems = append(l.node.Problems, Problem{What: what})
	}
	if namespace != "" {
		l.node.Problems[i].Namespaces = append(l.node.Problems[i].Namespaces, namespace)
	}
}

// machine reads what all namespaces share.
func (l *loader) machine(ctx context.Context) {
	var err error
	l.node.Kernel, err = kernel.RunningVersion()
	l.addProblem("", err)
	l.node.Log, err = conntrack.KernelLog(ctx)
	l.addProblem("", err)
	l.addProblem("", l.readNFS())
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) == nil {
		l.node.Up = time.Duration(now.Nano())
	}
	l.began = time.Now()
}

// namespace reads one network namespace, each part by itself.
func (l *loader) namespace(ctx context.Context, n conntrack.Namespace) {
	ns := Namespace{Report: conntrack.Report{Namespace: n}, Rules: &ruleset.Ruleset{}}
	entered := false
	err := n.Enter(func() error {
		entered = true
		name := n.String()
		rules, errs := ruleset.Read(ctx)
		ns.Rules, ns.AllRulesRead = rules, len(errs) == 0
		for _, err := range errs {
			l.addProblem(name, err)
		}
		if l.hooks.Pod != nil && !n.Own && n.PID != 0 && len(ns.Rules.OutputRedirects()) > 0 {
			ns.Hooked = l.hooks.Pod(n.PID)
		}
		l.addProblem(name, ns.readConntrack(ctx)) // after the rules: they say which ports to count
		if n.Own && l.uses != nil {
			l.addProblem("", ns.findRemoved(ctx, l.uses))
		}
		l.addProblem(name, ns.readLinks())
		l.addProblem(name, ns.readIPsec())
		l.addProblem(name, ns.readMarkRules())
		ns.readSysctls()
		ns.readProc()
		ns.findRoutes()
		return nil
	})
	if errors.Is(err, os.ErrNotExist) && !entered {
		err = errors.New("the network namespace vanished while the node was read")
	}
	l.addProblem(n.String(), err)
	if entered {
		l.node.Namespaces = append(l.node.Namespaces, ns)
	}
}

// readCountersAgain reads the counters a second time, to tell counters that grow now
// from counters that grew in the past.
func (l *loader) readCountersAgain(ctx context.Context, after time.Duration) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(time.Until(l.began.Add(after))):
	}
	l.node.Sampled = time.Since(l.began)
	for i := range l.node.Namespaces {
		ns := &l.node.Namespaces[i]
		if !ns.InUse() {
			continue
		}
		// If this fails, the first reading most likely failed too and is a Problem.
		_ = ns.Namespace.Do(func(c *conntrack.Conn) error {
			now, err := c.Stats(ctx)
			if err == nil {
				ns.Grown, ns.Counters = now.Minus(ns.Counters), now
			}
			return err
		})
	}
}

func (ns *Namespace) readConntrack(ctx context.Context) error {
	c, err := conntrack.Open()
	if err != nil {
		return err
	}
	defer c.Close()
	r, err := c.Report(ctx, ns.Namespace)
	if err != nil {
		return err
	}
	ns.Report = r
	if r.Entries == 0 {
		return nil
	}
	ns.States, ns.Endpoints = map[string]State{}, map[netip.AddrPort]*Endpoint{}
	ports := newPortCounter(ns.Rules)
	err = c.Dump(ctx, conntrack.Filter{}, func(e *conntrack.Entry) bool {
		ns.count(e)
		ports.count(e)
		return true
	})
	if err != nil {
		return err
	}
	return ns.readSourcePorts(ctx, c, ports)
}

// silent reports whether an entry of that timeout had no packet for longer than flows of its
// kind pause.
func (ns *Namespace) silent(timeout string, e *conntrack.Entry) bool {
	return pauses[timeout] > 0 && ns.Limits.Timeouts[timeout]-e.Timeout > pauses[timeout]
}

// count adds one entry to the counts. Entries are not stored, since the table may be large.
func (ns *Namespace) count(e *conntrack.Entry) {
	if name := e.TimeoutName(); name != "" {
		s := ns.States[name]
		s.Entries++
		if ns.silent(name, e) {
			s.Silent++
		}
		ns.States[name] = s
	}
	if !translatedUDP(e) {
		return
	}
	addr := e.Reply.Src
	p := ns.Endpoints[addr]
	if p == nil {
		p = &Endpoint{Example: *e}
		ns.Endpoints[addr] = p
	}
	p.Entries++
}

// findRemoved notes for each endpoint of an entry whether its Service still has it.
func (ns *Namespace) findRemoved(ctx context.Context, uses func(context.Context, []netip.AddrPort) ([]AddressUse, error)) error {
	var sample []*Endpoint
	var addrs []netip.AddrPort
	for _, p := range ns.Endpoints {
		if sample = append(sample, p); len(sample) == usesAtOnce/2 {
			break
		}
	}
	for _, p := range sample {
		addrs = append(addrs, p.Example.Orig.Dst, p.Example.Reply.Src)
	}
	if len(addrs) == 0 {
		return nil
	}
	known, err := uses(ctx, addrs)
	if err != nil || len(known) != len(addrs) {
		return err
	}
	for i, p := range sample {
		service, endpoint := known[2*i].Service, known[2*i+1].EndpointOf
		if service != "" && len(endpoint) < MostEndpointOf && !slices.Contains(endpoint, service) {
			p.RemovedFrom = service
		}
	}
	return nil
}

func (ns *Namespace) readSysctls() {
	is := func(name string) bool { s, _ := kernel.ReadSysctl(name); return s == "1" }
	ns.BeLiberal = is(beLiberal)
	ns.AutoHelper = is("net.netfilter.nf_conntrack_helper")
	if _, err := kernel.ReadSysctl(bridgeCall["ip"]); err == nil {
		ns.Bridged = map[string]bool{"ip": is(bridgeCall["ip"]), "ip6": is(bridgeCall["ip6"])}
	}
}

// readLinks reads the bridges, the VXLAN devices and those with several programs.
func (ns *Namespace) readLinks() error {
	list, err := kernel.Dump(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	ports := map[int]int{}
	for _, d := range list {
		ports[d.Attrs().MasterIndex]++
	}
	var refused error // the first error; the others would be the same
	for _, d := range list {
		l := Link{Name: d.Attrs().Name, Kind: d.Type()}
		if refused == nil {
			l.Programs, refused = programs(d.Attrs().Index)
		}
		switch l.Kind {
		case "bridge":
			l.Ports = ports[d.Attrs().Index]
		case "vxlan", "geneve":
			// A device that was deleted meanwhile has no offload.
			l.TxChecksum, _ = kernel.TxChecksumOffload(l.Name)
		case "ipip", "gre", "gretap", "wireguard":
		default:
			if l.Programs == nil {
				continue
			}
		}
		if l.Kind != "bridge" {
			l.StrictSource = filtersStrictly(l.Name) && !leadsByDefault(d.Attrs().Index)
		}
		ns.Links = append(ns.Links, l)
	}
	return refused
}

// filtersStrictly reports whether rp_filter of a device is 1. The larger value of the device and
// of all devices counts.
func filtersStrictly(device string) bool {
	own, _ := kernel.ReadSysctl(rpFilter(device))
	all, _ := kernel.ReadSysctl(rpFilter("all"))
	return max(own, all) == "1"
}

// leadsByDefault reports whether an IPv4 default route leads by a device.
func leadsByDefault(ifindex int) bool {
	list, _ := kernel.Dump(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
	return slices.ContainsFunc(list, func(r netlink.Route) bool {
		isDefault := r.Dst == nil || r.Dst.IP.IsUnspecified()
		return isDefault && (r.LinkIndex == ifindex ||
			slices.ContainsFunc(r.MultiPath, func(h *netlink.NexthopInfo) bool { return h.LinkIndex == ifindex }))
	})
}

// programs lists the tcx programs of a device if a hook has several: only then their
// order matters.
func programs(ifindex int) (map[string][]string, error) {
	found := map[string][]string{}
	for name, hook := range map[string]ebpf.AttachType{"ingress": ebpf.AttachTCXIngress, "egress": ebpf.AttachTCXEgress} {
		list, err := kernel.TCXPrograms(ifindex, hook)
		if err != nil {
			return nil, err
		}
		if len(list) > 1 {
			found[name] = list
		}
	}
	if len(found) == 0 {
		return nil, nil
	}
	return found, nil
}

// readIPsec reads the IPsec policies and, if there are any, detects the programs of the
// eBPF dataplane.
func (ns *Namespace) readIPsec() (err error) {
	if ns.IPsec, err = kernel.XfrmPolicies(); err != nil || len(ns.IPsec) == 0 {
		return err
	}
	list, err := kernel.Dump(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, d := range list {
		names, err := kernel.IngressPrograms(d)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(names, func(name string) bool { return slices.Contains(spillwayPrograms, name) }) {
			ns.EBPF = true
			return nil
		}
	}
	return nil
}

// readMarkRules reads the routing rules that packets without a mark do not meet.
func (ns *Namespace) readMarkRules() error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := kernel.Dump(func() ([]netlink.Rule, error) { return netlink.RuleList(family) })
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue // a kernel without policy routing, or without IPv6
		}
		if err != nil {
			return fmt.Errorf("list routing rules: %w", err)
		}
		for i := range list {
			if r := &list[i]; r.Mark != 0 && !r.Invert {
				ns.MarkRules = append(ns.MarkRules, markRule(r, family == netlink.FAMILY_V6))
			}
		}
	}
	return nil
}

func markRule(r *netlink.Rule, v6 bool) MarkRule {
	m := MarkRule{Input: r.IifName, V6: v6}
	from, to, input := "all", "", ""
	if r.Src != nil {
		m.Src, _ = netip.ParsePrefix(r.Src.String())
		from = r.Src.String()
	}
	if r.Dst != nil {
		m.Dst, _ = netip.ParsePrefix(r.Dst.String())
		to = " to " + r.Dst.String()
	}
	if r.IifName != "" {
		input = " iif " + r.IifName
	}
	mark := fmt.Sprintf("%#x", r.Mark)
	if r.Mask != nil && *r.Mask != math.MaxUint32 {
		mark += fmt.Sprintf("/%#x", *r.Mask)
	}
	m.Text = fmt.Sprintf("%d: from %s%s fwmark %s%s", r.Priority, from, to, mark, input)
	switch r.Table {
	case unix.RT_TABLE_UNSPEC:
	case unix.RT_TABLE_MAIN:
		m.Text += " lookup main"
	default:
		m.Text += fmt.Sprintf(" lookup %d", r.Table)
	}
	return m
}

// spillwayPrograms are the names of the eBPF dataplane's programs at ingress: of tcx
// links, and of its filter.
var spillwayPrograms = []string{"from_network", "from_pod", "spillway"}

// readProc reads the files of /proc/net that exist.
func (ns *Namespace) readProc() {
	ns.ChecksumErrors = map[string]uint64{}
	snmp, _ := os.ReadFile("/proc/thread-self/net/snmp")
	var header []string
	for line := range strings.Lines(string(snmp)) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if i := slices.Index(header, "InCsumErrors"); i > 0 && i < len(fields) && header[0] == fields[0] {
			n, _ := strconv.ParseUint(fields[i], 10, 64)
			ns.ChecksumErrors[strings.ToLower(strings.TrimSuffix(fields[0], ":"))] = n
		}
		header = fields
	}
	ipvs, _ := os.ReadFile("/proc/thread-self/net/ip_vs")
	ns.IPVS = strings.Count(string(ipvs), "\n") > 3 // three lines are headings
}

// findRoutes asks the kernel for the route to each endpoint.
func (ns *Namespace) findRoutes() {
	failed := map[string]bool{}
	if len(ns.Endpoints) > 0 {
		list, _ := kernel.Dump(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, 0) })
		for _, n := range list {
			if n.State&unix.NUD_FAILED != 0 {
				failed[n.IP.String()] = true
			}
		}
	}
	for endpoint, p := range ns.Endpoints {
		addr := endpoint.Addr()
		routes, err := netlink.RouteGet(addr.AsSlice())
		switch {
		case errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINVAL):
			p.Unreachable = "no route"
		case err != nil || len(routes) == 0:
		case routes[0].Type == unix.RTN_LOCAL:
			p.Local = true
		case routes[0].Gw == nil && failed[addr.String()]:
			p.Unreachable = "no neighbor answers for it"
		}
	}
}
