// Package drops is the command that follows dropped packets.
package drops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/diagnosis/drops/cause"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/node/conntrack"
)

// config is the command line of `spillway drops`.
type config struct {
	addresses, pods, netns, reasons []string
	ports                           []uint
	protocol                        string
	pins                            cli.Pins
	socket                          nodeclient.Socket
	output                          cli.Output
	cluster                         reach.Flags
	all                             bool
	rate, count                     int
	duration                        time.Duration
}

// NewCommand returns the command drops.
func NewCommand() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "drops",
		Short: "Show packets that the kernel drops: where, by what, and why",
		Long: `Follows the packets that this machine's kernel drops, in every network namespace.
Reports for each packet the hop (namespace or pod, interface, netfilter hook and table,
the kernel's function) and the kernel's reason. Explains each reason once. Changes
nothing and needs no agent. An agent of this machine names Services, endpoints and pods.

A drop is shown if it matches every filter. A filter with several values matches if one
of them does. The kernel compares the packet as it is at the hop: after DNAT it has the
endpoint's address and port. With -o json, each line is an object. Needs root, BTF and
Linux 5.17.

With --node or --all-nodes it runs in the agents' containers, by exec through the API
server. That takes more than the rights of a viewer. There, it names fewer network
namespaces. --rate and --count are of each node. The exit code is 1 if one of them fails.`,
		Example: `  spillway drops --address 10.244.1.7 --port 80
  spillway drops --pod web-7d4b9 --for 10s
  spillway drops --reason NETFILTER_DROP --count 1 -o json
  spillway drops --all-nodes --address 10.244.1.7 --for 10s`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.output.Validate(); err != nil {
				return err
			}
			if err := cli.NotEmpty(cmd.Flags(), "address", "port", "protocol", "pod", "netns", "reason", "api-socket"); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			if !c.cluster.Local() {
				return c.cluster.Run(ctx, cmd, c.output)
			}
			if err := c.cluster.Validate(cmd, false); err != nil {
				return err
			}
			return c.run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringSliceVar(&c.addresses, "address", nil,
		"Source or destination `address` or prefix, such as 10.244.1.7 or 10.244.0.0/16. After DNAT it is the endpoint's.")
	f.UintSliceVar(&c.ports, "port", nil, "Source or destination `port`.")
	f.Lookup("port").DefValue = "" // pflag shows "[]"
	f.StringVar(&c.protocol, "protocol", "", "Protocol: tcp, udp, sctp, icmp, icmpv6 or a number.")
	f.StringSliceVar(&c.pods, "pod", nil, "Packets in this `pod`, from it or to it: its address, or the name of a pod of this node.")
	f.StringSliceVar(&c.netns, "netns", nil, "Network `namespaces`: a name that 'spillway top' shows, a process id, or here.")
	f.StringSliceVar(&c.reasons, "reason", nil, "The kernel's drop `reason`, or '!REASON' for all others.")
	c.pins.AddFlag(f, "Directory of the agent's pins, to explain drops of the agent's programs.")
	c.socket.AddFlag(f)
	f.BoolVar(&c.all, "all", false, "Also show harmless drops: multicast, and "+strings.Join(drops.Quiet, ", ")+".")
	f.IntVar(&c.rate, "rate", 100, "Most `drops` shown a second; the others are counted. 0: no limit.")
	f.DurationVar(&c.duration, "for", 0, "Time after which to end. 0: when interrupted.")
	f.IntVar(&c.count, "count", 0, "Number of `drops` after which to end. 0: when interrupted.")
	c.output.AddFlag(cmd)
	c.cluster.AddNodes(f)
	c.cluster.Complete(cmd, &c.socket)
	cli.CompleteNamespaces(cmd, "netns")
	cli.Choices(cmd, "protocol", "tcp", "udp", "sctp", "icmp", "icmpv6")
	cli.GroupFlags(f, "Filter", "address", "port", "protocol", "pod", "netns", "reason", "all")
	return cmd
}

// filters checks the command line and looks up the names in it.
func (c *config) filters() (drops.Config, error) {
	out := drops.Config{Reasons: c.reasons, All: c.all, Rate: c.rate}
	if c.duration < 0 || c.count < 0 {
		return out, cli.UsageErrorf("--for and --count: must not be negative")
	}
	for _, s := range c.addresses {
		prefix, err := addressOrPrefix(s)
		if err != nil {
			return out, cli.UsageErrorf("--address %q: an address or a prefix is expected, such as 10.96.0.10 or 10.244.0.0/16", s)
		}
		out.Addresses = append(out.Addresses, prefix)
	}
	for _, port := range c.ports {
		if port == 0 || port > 65535 {
			return out, cli.UsageErrorf("--port %d: use 1 to 65535", port)
		}
		out.Ports = append(out.Ports, uint16(port))
	}
	var err error
	if out.Protocol, err = parseProtocol(c.protocol); err != nil {
		return out, err
	}
	if len(c.netns) > 0 {
		if out.Namespaces, err = cli.Namespaces(c.netns); err != nil {
			return out, err
		}
	}
	if len(c.pods) > 0 {
		list, _ := conntrack.Namespaces()
		for _, want := range c.pods {
			pod, err := drops.FindPod(want, list)
			if err != nil {
				return out, cli.UsageErrorf("--pod %v", err)
			}
			out.Pods = append(out.Pods, pod)
		}
	}
	not := slices.ContainsFunc(c.reasons, func(r string) bool { return strings.HasPrefix(r, "!") })
	switch {
	case c.rate < 0:
		return out, cli.UsageErrorf("--rate %d: must not be negative", c.rate)
	case not && slices.ContainsFunc(c.reasons, func(r string) bool { return !strings.HasPrefix(r, "!") }):
		return out, cli.UsageErrorf("--reason %s: name the wanted reasons, or the unwanted ones with '!', but not both",
			strings.Join(c.reasons, ","))
	}
	if err := out.Validate(); err != nil {
		return out, cli.UsageErrorf("filters: %v", err)
	}
	return out, nil
}

// addressOrPrefix reads an address as a prefix of all its bits.
func addressOrPrefix(s string) (netip.Prefix, error) {
	if prefix, err := netip.ParsePrefix(s); err == nil {
		return prefix, nil
	}
	addr, err := netip.ParseAddr(s)
	if err != nil || addr.Zone() != "" {
		return netip.Prefix{}, errors.New("not an address")
	}
	return netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()), nil
}

func parseProtocol(s string) (uint8, error) {
	if s == "" {
		return 0, nil
	}
	if n, err := strconv.ParseUint(s, 10, 8); err == nil && n > 0 {
		return uint8(n), nil
	}
	for n := range 256 {
		if conntrack.ProtocolName(uint8(n)) == strings.ToLower(s) {
			return uint8(n), nil
		}
	}
	return 0, cli.UsageErrorf("--protocol %q: use tcp, udp, sctp, icmp, icmpv6 or a number from 1 to 255", s)
}

func (c *config) run(ctx context.Context, out, stderr io.Writer) error {
	config, err := c.filters()
	if err != nil {
		return err
	}
	// Read before the first drop, which may come at once: it counts up a verdict.
	verdicts := cause.ReadVerdicts(c.pins.Dir())
	follower, err := drops.Follow(config)
	var unknown *drops.UnknownReasonError
	if errors.As(err, &unknown) {
		return cli.UsageErrorf("--reason %v", unknown)
	}
	if err != nil {
		return err
	}
	defer follower.Close()
	for _, line := range follower.Missing() {
		fmt.Fprintf(stderr, "spillway: not available on this kernel: %s\n", line)
	}
	names := nodeclient.NewNames(c.socket.Dialer())
	if err := names.Probe(ctx); err != nil && ctx.Err() == nil {
		fmt.Fprintf(stderr, "spillway: %v\n", err)
	}
	if !c.output.ForPrograms() {
		fmt.Fprintln(stderr, "spillway: following dropped packets; end with Ctrl-C")
	}
	if c.duration > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, c.duration)
		defer stop()
	}
	return c.follow(ctx, follower, explainer{verdicts, follower, names}, c.targets(&config), out, stderr)
}

// follow prints drops until ctx ends or --count is reached, and then a summary of the
// drops that it did not print.
func (c *config) follow(ctx context.Context, follower *drops.Follower, explain explainer, targets []*drops.Target, out,
	stderr io.Writer) error {
	shown := 0
	byReason := map[string]uint64{}
	seen := explained{}
	checked := time.Now()
	for c.count == 0 || shown < c.count {
		if len(targets) > 0 && time.Since(checked) > drops.TargetCheck {
			if err := checkTargets(targets, follower, stderr); err != nil {
				return err
			}
			checked = time.Now()
		}
		d, err := nextWithin(ctx, follower, drops.TargetCheck)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, context.DeadlineExceeded) {
			continue
		}
		if err != nil {
			return err
		}
		result := explain.drop(ctx, &d)
		result.explained = seen
		if err := c.print(out, result); err != nil {
			return err
		}
		shown++
		byReason[d.Reason]++
	}
	return c.summarize(follower, shown, byReason, stderr)
}

// print prints a drop; JSON takes one line.
func (c *config) print(out io.Writer, d dropResult) error {
	if c.output.ForPrograms() {
		return c.output.Encode(out, d, "")
	}
	return c.output.Print(out, d)
}

// summarize prints the number of shown drops, the number of others, and the reason.
func (c *config) summarize(follower *drops.Follower, shown int, byReason map[string]uint64, stderr io.Writer) error {
	counts, err := follower.Counts()
	if err != nil {
		return err
	}
	line := fmt.Sprintf("spillway: %d shown", shown)
	if counts.Limited > 0 {
		line += fmt.Sprintf("; %d not shown, more than --rate %d a second", counts.Limited, c.rate)
	}
	if counts.Lost > 0 {
		line += fmt.Sprintf("; %d lost, the buffer was full", counts.Lost)
	}
	if other := counts.Seen - counts.Matched; other > 0 {
		line += fmt.Sprintf("; not matching the filters: %d", other)
	}
	dropped, err := follower.Reasons()
	if err != nil {
		return err
	}
	if reasons := reasonsText(dropped, byReason); reasons != "" {
		line += "\nspillway: by reason: " + reasons
	}
	_, err = fmt.Fprintln(stderr, line)
	return err
}

// reasonsText formats counts such as "NETFILTER_DROP 4981 (98 shown), NO_SOCKET 2", the
// most frequent first. It adds "shown" where some are not.
func reasonsText(all, shown map[string]uint64) string {
	for reason, n := range shown {
		all[reason] = max(all[reason], n)
	}
	names := slices.SortedFunc(maps.Keys(all), func(a, b string) int {
		return cmp.Or(cmp.Compare(all[b], all[a]), cmp.Compare(a, b))
	})
	var parts []string
	for _, name := range names {
		part := fmt.Sprintf("%s %d", name, all[name])
		if all[name] != shown[name] {
			part += fmt.Sprintf(" (%d shown)", shown[name])
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ", ")
}

// nextWithin waits for the next drop, at most for d.
func nextWithin(ctx context.Context, follower *drops.Follower, d time.Duration) (drops.Drop, error) {
	ctx, stop := context.WithTimeout(ctx, d)
	defer stop()
	return follower.Next(ctx)
}

// checkTargets checks whether the namespaces that flags name still exist. It follows new
// namespaces of the same names, and reports both.
func checkTargets(targets []*drops.Target, follower *drops.Follower, stderr io.Writer) error {
	var list []conntrack.Namespace
	for _, t := range targets {
		if t.Exists() {
			continue
		}
		if list == nil {
			list, _ = conntrack.Namespaces() // a namespace that cannot be read counts as deleted
		}
		line, err := t.Follow(list, follower.Watch)
		if err != nil {
			return err
		}
		if line != "" {
			fmt.Fprintf(stderr, "spillway: %s\n", escape.Text(line))
		}
	}
	return nil
}

// targets are the network namespaces and pods of the command line, as filters found
// them.
func (c *config) targets(filters *drops.Config) (all []*drops.Target) {
	for _, name := range c.netns {
		i := slices.IndexFunc(filters.Namespaces, func(n conntrack.Namespace) bool { return n.Is(name) })
		if i >= 0 && !filters.Namespaces[i].Own {
			all = append(all, drops.NewTarget("--netns", name, filters.Namespaces[i:i+1], nil))
		}
	}
	for _, p := range filters.Pods {
		if _, err := netip.ParseAddr(p.Name); err != nil { // drops of an address are followed in any case
			all = append(all, drops.NewTarget("--pod", p.Name, p.Namespaces, p.Addresses))
		}
	}
	return all
}
