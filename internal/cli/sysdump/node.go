package sysdump

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/diagnosis/sysdump"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
)

// node is where the collectors of this node look.
type node struct {
	proc     string // "/proc"
	logs     string // directory of the Pods' logs
	pins     string // directory of the agent's pins
	metrics  string // address of the agent's /metrics
	healthz  string // address of the agent's /healthz
	api      *nodeclient.Socket
	redactor *sysdump.Redactor
	// pods has the agents' Pods; nil: no API server is asked.
	pods func(context.Context) (*reach.Pods, error)
	// agentNamespace is the agents' namespace where no API server says which Pods are agents.
	agentNamespace string
}

// mostEntries bounds the entries of one map, and the flows of one agent.
const mostEntries = 5000

// podsTimeout is the time that the search for the agents' Pods may take. It leaves a part the
// time to do without.
const podsTimeout = 10 * time.Second

// logTail is the number of bytes of one log.
const logTail = 512 << 10

// collectors returns those of this node.
func (n *node) collectors() []sysdump.Collector {
	list := []sysdump.Collector{
		{File: "node/version.json", About: "versions of spillway and of the kernel", Collect: version},
		{File: "node/agents.json", About: "command lines of the agents on this node: the flags", Collect: n.agents},
		{File: "node/healthz.txt", About: "answers of the agent's health endpoints", Collect: n.health},
		{File: "node/metrics.txt", About: "the agent's metrics", Collect: func(ctx context.Context, w io.Writer) error {
			return get(ctx, w, "http://"+n.metrics+"/metrics")
		}},
		{File: "node/doctor.json", About: "findings of 'spillway doctor'", Timeout: time.Minute, Collect: findings},
		{File: "node/kernel.json", About: "features of the kernel", Collect: n.features},
		{File: "node/sysctls.txt", About: "sysctls of conntrack and of the network", Collect: n.sysctls},
		{File: "node/conntrack.json", About: "sizes, counts and counters of conntrack, by network namespace", Collect: conntrackCounts},
		{File: "node/network.json", About: "links, addresses, routes and rules", Collect: network},
		{File: "node/nft.txt", About: "Spillway's own nftables tables", Collect: nftTables},
		{File: "node/iptables.txt", About: "Spillway's own chains and rules of iptables", Collect: iptablesRules},
		{File: "node/agent.log", About: "the end of the agents' logs on this node", Collect: n.agentLogs},
	}
	maps, _ := inspect.PinnedMaps() // the objects are part of the program
	for _, name := range maps {
		list = append(list, sysdump.Collector{
			File: "node/maps/" + name + ".jsonl", About: fmt.Sprintf("eBPF map %s, at most %d entries", name, mostEntries),
			Collect: func(ctx context.Context, w io.Writer) error { return n.dumpMap(ctx, w, name) },
		})
	}
	return append(list, n.apiCollectors()...)
}

func writeJSON(w io.Writer, value any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(value)
}

func version(_ context.Context, w io.Writer) error {
	var uname unix.Utsname
	if err := unix.Uname(&uname); err != nil {
		return err
	}
	return writeJSON(w, map[string]any{
		"spillway": cli.Build(), "kernel": unix.ByteSliceToString(uname.Release[:]), "kernelVersion": unix.ByteSliceToString(uname.Version[:]),
		"machine": unix.ByteSliceToString(uname.Machine[:]),
	})
}

// agents finds the agents by their command lines. A container without hostPID sees its own
// alone.
func (n *node) agents(_ context.Context, w io.Writer) error {
	type process struct {
		PID  string   `json:"pid"`
		Args []string `json:"args"`
	}
	var found []process
	for pid, args := range agentProcesses(n.proc) {
		found = append(found, process{pid, n.redactor.Args(args)})
	}
	if found == nil {
		return errors.New("no agent runs here, or its processes cannot be seen")
	}
	return writeJSON(w, found)
}

// get writes the answer to a request.
func get(ctx context.Context, w io.Writer, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(w, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: HTTP status %s", url, resp.Status)
	}
	return nil
}

// health writes the answers also where their status is an error.
func (n *node) health(ctx context.Context, w io.Writer) error {
	var failed []error
	for _, url := range []string{"http://" + n.healthz + "/healthz", "http://" + n.healthz + "/livez", "http://" + n.metrics + "/proxyMode"} {
		fmt.Fprintf(w, "%s: ", url)
		failed = append(failed, get(ctx, w, url))
		fmt.Fprintln(w)
	}
	return errors.Join(failed...)
}

func findings(ctx context.Context, w io.Writer) error {
	loaded, err := doctor.Load(ctx, doctor.Config{Namespaces: conntrack.Namespaces, Sample: time.Second})
	if err != nil {
		return err
	}
	return writeJSON(w, doctor.NewReport(loaded, doctor.Examine(loaded)))
}

func (n *node) features(_ context.Context, w io.Writer) error {
	features, err := kernel.Probe(kernel.Place{BPFFS: n.pins})
	if err != nil {
		return err
	}
	needed := map[string]string{}
	for name, err := range features.Needed {
		needed[name] = "present"
		if err != nil {
			needed[name] = err.Error()
		}
	}
	return writeJSON(w, map[string]any{
		"needed": needed, "lacks": features.Lacks, "tcx": features.TCX, "setRetval": features.SetRetval,
		"csumReplaceIPv6": features.CsumReplaceIPv6, "conntrackLookup": features.ConntrackLookup, "btf": features.BTF,
		"socketIterators": features.SocketIterators,
	})
}

// sysctlPatterns are files below /proc/sys/net.
var sysctlPatterns = []string{
	"netfilter/nf_conntrack_*", "ipv4/ip_forward", "ipv4/ip_local_port_range", "ipv4/ip_local_reserved_ports", "ipv4/conf/*/rp_filter",
	"ipv4/conf/*/forwarding", "ipv4/conf/*/route_localnet", "ipv6/conf/*/forwarding", "ipv6/conf/*/disable_ipv6", "bridge/*",
	"core/bpf_jit_*", "core/somaxconn", "core/netdev_max_backlog", "ipv4/tcp_max_syn_backlog", "ipv4/vs/conntrack",
}

// mostSysctls bounds those of one pattern: a node may have thousands of devices.
const mostSysctls = 200

func (n *node) sysctls(_ context.Context, w io.Writer) error {
	root := filepath.Join(n.proc, "sys")
	for _, pattern := range sysctlPatterns {
		files, err := filepath.Glob(filepath.Join(root, "net", pattern))
		if err != nil {
			return err
		}
		for _, file := range files[:min(len(files), mostSysctls)] {
			value, err := os.ReadFile(file)
			if err != nil {
				continue // it may only be written, or its device has vanished
			}
			name, _ := filepath.Rel(root, file)
			fmt.Fprintf(w, "%s = %s\n", name, strings.Join(strings.Fields(string(value)), " "))
		}
	}
	return nil
}

func conntrackCounts(ctx context.Context, w io.Writer) error {
	reports, err := conntrack.ReadAll(ctx)
	return errors.Join(writeJSON(w, reports), err)
}

func network(_ context.Context, w io.Writer) error {
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	var out struct {
		Links  []map[string]any `json:"links"`
		Routes []string         `json:"routes"`
		Rules  []string         `json:"rules"`
	}
	for _, l := range links {
		a := l.Attrs()
		addrs, _ := netlink.AddrList(l, netlink.FAMILY_ALL) // the link may have vanished
		var list []string
		for _, addr := range addrs {
			list = append(list, addr.IPNet.String())
		}
		out.Links = append(out.Links, map[string]any{
			"name": a.Name, "index": a.Index, "type": l.Type(), "mtu": a.MTU, "state": a.OperState.String(), "flags": a.Flags.String(),
			"master": names[a.MasterIndex], "addresses": list,
		})
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return err
		}
		for _, r := range routes {
			out.Routes = append(out.Routes, fmt.Sprintf("%s dev %s", r, names[r.LinkIndex]))
		}
		rules, err := netlink.RuleList(family)
		if err != nil {
			return err
		}
		for _, r := range rules {
			out.Rules = append(out.Rules, r.String())
		}
	}
	return writeJSON(w, out)
}

// run writes the output of a program.
func run(ctx context.Context, w io.Writer, argv ...string) error {
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = w, &errs, time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(errs.String()))
	}
	return nil
}

// nftTables writes the tables whose name begins with Spillway's.
func nftTables(ctx context.Context, w io.Writer) error {
	var tables bytes.Buffer
	if err := run(ctx, &tables, "nft", "list", "tables"); err != nil {
		return err
	}
	for line := range strings.Lines(tables.String()) {
		if f := strings.Fields(line); len(f) == 3 && strings.HasPrefix(f[2], "spillway") { // "table inet spillway"
			if err := run(ctx, w, "nft", "list", "table", f[1], f[2]); err != nil {
				return err
			}
		}
	}
	return nil
}

// iptablesRules writes the lines of both variants that name Spillway's chains or mark.
func iptablesRules(ctx context.Context, w io.Writer) error {
	var failed []error
	for _, program := range []string{"iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save"} {
		if _, err := exec.LookPath(program); err != nil {
			failed = append(failed, err)
			continue
		}
		var all bytes.Buffer
		failed = append(failed, run(ctx, &all, program))
		fmt.Fprintf(w, "# %s\n", program)
		for line := range strings.Lines(all.String()) {
			if strings.HasPrefix(line, "*") || strings.Contains(line, "SPW-") || strings.Contains(line, "spillway") {
				if _, err := io.WriteString(w, line); err != nil {
					return err
				}
			}
		}
	}
	return errors.Join(failed...)
}

// agentLogs writes the ends of the logs that the kubelet keeps of the agents' containers.
func (n *node) agentLogs(ctx context.Context, w io.Writer) error {
	isAgent, how := n.agentPod(ctx)
	all, err := filepath.Glob(filepath.Join(n.logs, "*_*_*", agentContainer, "*.log"))
	if err != nil {
		return err
	}
	var files []string
	for _, file := range all {
		// The kubelet names the directory NAMESPACE_NAME_UID. None of the three has a "_".
		pod := strings.Split(filepath.Base(filepath.Dir(filepath.Dir(file))), "_")
		if len(pod) == 3 && isAgent(pod[0], pod[1], pod[2]) {
			files = append(files, file)
		}
	}
	if len(files) == 0 {
		return fmt.Errorf("no log of an agent in %s: %s: %w", n.logs, how, fs.ErrNotExist)
	}
	fmt.Fprintf(w, "# %s\n", how)
	slices.Sort(files)
	const most = 4
	for _, file := range files[max(0, len(files)-most):] {
		fmt.Fprintf(w, "# %s\n", file)
		if err := tail(w, file, logTail); err != nil {
			return err
		}
	}
	return nil
}

// agentPod returns what tells the agents' Pods from others, and how it does. Without the API
// server, the namespace does: an author of Pods elsewhere cannot choose it.
func (n *node) agentPod(ctx context.Context) (isAgent func(namespace, name, uid string) bool, how string) {
	byName := func(namespace, name, _ string) bool {
		return namespace == n.agentNamespace && strings.Contains(name, "spillway")
	}
	how = "Pods of namespace " + n.agentNamespace + " by their names"
	if n.pods == nil {
		return byName, how
	}
	ctx, cancel := context.WithTimeout(ctx, podsTimeout)
	defer cancel()
	found, err := n.pods(ctx)
	if err != nil {
		return byName, how + ": " + escape.OneLine(err)
	}
	uids := map[string]bool{}
	for _, p := range found.Agents {
		uids[string(p.UID)] = true
	}
	return func(_, _, uid string) bool { return uids[uid] }, "Pods of the agents' DaemonSet in namespace " + found.Namespace
}

// tail writes the end of a file, from the beginning of a line.
func tail(w io.Writer, file string, size int64) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	from := max(0, info.Size()-size)
	text, err := io.ReadAll(io.NewSectionReader(f, from, size))
	if err != nil {
		return err
	}
	if from > 0 {
		text = text[bytes.IndexByte(text, '\n')+1:]
	}
	_, err = w.Write(text)
	return err
}

var errEnough = errors.New("enough entries")

func (n *node) dumpMap(ctx context.Context, w io.Writer, name string) error {
	entries := 0
	lines := json.NewEncoder(w)
	err := inspect.Dump(n.pins, name, func(key, value []inspect.Field) error {
		if entries++; entries > mostEntries {
			return errEnough
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return lines.Encode(map[string]any{"key": fields(key), "value": fields(value)})
	})
	if errors.Is(err, errEnough) {
		return nil
	}
	return err
}

func fields(list []inspect.Field) map[string]any {
	out := map[string]any{}
	for _, f := range list {
		out[f.Name] = f.Value
	}
	return out
}

// writeLine writes a value as JSON on one line.
func writeLine(w io.Writer, value any) error { return json.NewEncoder(w).Encode(value) }
