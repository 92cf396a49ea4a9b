// Package lab is the command that creates clusters on one machine, and runs published
// experiments there.
package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/lab/topology"
	"spillway.dev/spillway/lab/workload"
)

// labPatience is the time after which the lab starts to print its steps.
const labPatience = 2 * time.Second

// NewCommand returns the command lab.
func NewCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Run published experiments, or create a cluster of network namespaces, on this machine",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return cli.UsageErrorf("no lab command given: use run, list, diff, up, down, exec, status, nodes, serve or ask")
		},
	}
	cmd.AddCommand(newUpCommand(), newDownCommand(), newExecCommand(), newStatusCommand(),
		newNodesCommand(), newServeCommand(), newAskCommand(),
		newRunCommand(), newListCommand(), newDiffCommand(), newReportCommand(), newHeadlineCommand(), newRestoreCommand())
	return cmd
}

func newUpCommand() *cobra.Command {
	spec := topology.DefaultSpec("lab")
	spec.ExternalRanges = nil
	var output, lan4, lan6, cidr4, cidr6 string
	var ranges, families []string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Create a cluster, or repair it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkLabOutput(output); err != nil {
				return err
			}
			err := errors.Join(parsePrefix(&spec.LAN4, lan4), parsePrefix(&spec.LAN6, lan6),
				parsePrefix(&spec.ClusterCIDR4, cidr4), parsePrefix(&spec.ClusterCIDR6, cidr6),
				parseFamilies(&spec, families))
			for _, text := range ranges {
				var p netip.Prefix
				err = errors.Join(err, parsePrefix(&p, text))
				spec.ExternalRanges = append(spec.ExternalRanges, p)
			}
			if err = errors.Join(err, spec.Validate()); err != nil {
				return cli.UsageErrorf("%v", err)
			}
			return labUp(cmd, spec, output)
		},
	}
	f := cmd.Flags()
	f.StringVar(&spec.Name, "name", spec.Name, "Name of the cluster.")
	f.IntVar(&spec.Nodes, "nodes", spec.Nodes, "Number of nodes.")
	f.IntVar(&spec.PodsPerNode, "pods", spec.PodsPerNode, "Number of pods on each node.")
	f.IntVar(&spec.Clients, "clients", spec.Clients, "Number of machines outside the cluster.")
	f.StringVar(&spec.PodNetwork, "pod-network", spec.PodNetwork, "Network between pods of different nodes: routed or vxlan.")
	f.StringSliceVar(&families, "ip-families", []string{"IPv4", "IPv6"}, "Address families.")
	f.StringVar(&lan4, "lan4", spec.LAN4.String(), "IPv4 network of nodes and clients.")
	f.StringVar(&lan6, "lan6", spec.LAN6.String(), "IPv6 network of nodes and clients.")
	f.StringVar(&cidr4, "cluster-cidr4", spec.ClusterCIDR4.String(), "IPv4 addresses of pods. Each node gets a /24.")
	f.StringVar(&cidr6, "cluster-cidr6", spec.ClusterCIDR6.String(), "IPv6 addresses of pods. Each node gets a /64.")
	f.StringSliceVar(&ranges, "external-ranges", nil, "Address ranges that clients route to node0 (default: 203.0.113.0/24,2001:db8:ff::/64).")
	f.IntVar(&spec.RPFilter, "rp-filter", spec.RPFilter, "rp_filter in every namespace: 0 off, 1 strict, 2 loose.")
	f.BoolVar(&spec.Masquerade, "masquerade", false, "Load flannel's masquerade rules on the nodes. They enable conntrack there.")
	f.BoolVar(&spec.Conntrack, "conntrack", false, "Enable conntrack on the nodes.")
	f.StringSliceVar(&spec.Zones, "zones", nil, "Zones, assigned to nodes in turn (default: one for each node).")
	labOutputFlag(cmd, &output)
	return cmd
}

func labUp(cmd *cobra.Command, spec topology.Spec, output string) error {
	ctx, stop := cli.UntilSignal(cmd.Context())
	defer stop()
	report, done := labProgress(cmd.ErrOrStderr())
	c, err := topology.Up(ctx, spec, topology.WithProgress(report))
	done()
	if err != nil {
		return err
	}
	s, err := statusOf(c)
	if err != nil {
		return err
	}
	return printLabStatus(cmd.OutOrStdout(), []labStatus{s}, output)
}

func newDownCommand() *cobra.Command {
	var name string
	var all bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Stop a cluster's processes and remove it; no error if there is none",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := topology.RequireRoot(); err != nil {
				return err
			}
			if all && cmd.Flags().Changed("name") {
				return cli.UsageErrorf("--all and --name: give one of them")
			}
			report, done := labProgress(cmd.ErrOrStderr())
			defer done()
			if all {
				report("remove all clusters")
				return topology.DownAll()
			}
			report("remove " + name)
			return topology.Down(name)
		},
	}
	cmd.Flags().StringVar(&name, "name", "lab", "Name of the cluster.")
	cmd.Flags().BoolVar(&all, "all", false, "Remove every cluster of this machine.")
	return cmd
}

func newStatusCommand() *cobra.Command {
	var name, output string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show clusters, their hosts, and the processes in them",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkLabOutput(output); err != nil {
				return err
			}
			if err := topology.RequireRoot(); err != nil {
				return err
			}
			names, err := []string{name}, error(nil)
			if name == "" {
				if names, err = topology.List(); err != nil {
					return err
				}
			}
			all := []labStatus{}
			for _, n := range names {
				c, err := topology.Load(n)
				if err != nil && name != "" {
					return err
				}
				s := labStatus{Name: n, Status: "broken: run \"spillway-lab lab down --name " + n + "\""}
				if err == nil {
					if s, err = statusOf(c); err != nil {
						return err
					}
				}
				all = append(all, s)
			}
			return printLabStatus(cmd.OutOrStdout(), all, output)
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "Name of the cluster (default: all).")
	labOutputFlag(cmd, &output)
	return cmd
}

func newNodesCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "nodes [--name CLUSTER]",
		Short: "Print a cluster's Nodes as a Kubernetes manifest",
		Args:  cobra.MaximumNArgs(1), // the cluster, for compatibility
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if cmd.Flags().Changed("name") {
					return cli.UsageErrorf("lab nodes %s and --name: give one of them", args[0])
				}
				name = args[0]
			}
			c, err := topology.Load(name)
			if err != nil {
				return err
			}
			text, err := c.NodesYAML()
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	cmd.Flags().StringVar(&name, "name", "lab", "Name of the cluster.")
	return cmd
}

func newServeCommand() *cobra.Command {
	var c workload.Config
	cmd := &cobra.Command{
		Use:       "serve http|dns|tcp|udp|tftp",
		Short:     "Run a server that returns its name and its client's address, until SIGTERM",
		Example:   "  spillway-lab lab exec node0-pod0 -- spillway-lab lab serve tcp --listen :7000 --name pod0",
		Args:      cobra.ExactArgs(1),
		ValidArgs: []string{workload.HTTP, workload.DNS, workload.TCP, workload.UDP, workload.TFTP},
		RunE: func(cmd *cobra.Command, args []string) error {
			c.Kind = args[0]
			if err := c.Validate(); err != nil {
				return cli.UsageErrorf("%v", err)
			}
			return workload.Main(c, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Listen, "listen", "", "Port (both address families), or address and port.")
	f.StringVar(&c.Name, "name", "server", "Name that the server returns.")
	f.IntVar(&c.Size, "size", 0, "Bytes of an HTTP body or a TFTP file.")
	f.BoolVar(&c.Stream, "stream", false, "tcp: send numbered lines instead of an echo.")
	f.DurationVar(&c.Interval, "interval", 10*time.Millisecond, "tcp: time between two lines.")
	f.StringVar(&c.Dir, "dir", "", "http: parent of nginx's directory.")
	return cmd
}

func newAskCommand() *cobra.Command {
	var q workload.Question
	cmd := &cobra.Command{
		Use:   "ask http|tcp|udp ADDRESS:PORT",
		Short: "Query a lab server for its name and the client address that it sees, and print them as JSON",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			q.Kind, q.To = args[0], args[1]
			a := workload.Put(cmd.Context(), q)
			if err := json.NewEncoder(cmd.OutOrStdout()).Encode(a); err != nil {
				return err
			}
			if a.Outcome != workload.Answered {
				return fmt.Errorf("ask %s: %s: %s", q.To, a.Outcome, a.Error)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&q.From, "from", "", "Source address and port.")
	cmd.Flags().DurationVar(&q.Timeout, "timeout", 2*time.Second, "Timeout for the answer.")
	return cmd
}

// labStatus is the output of status and up.
type labStatus struct {
	Name   string         `json:"name"`
	Status string         `json:"status"`
	Spec   *topology.Spec `json:"spec,omitempty"`
	Hosts  []labHost      `json:"hosts"`
}

type labHost struct {
	*topology.Host
	Processes        int `json:"processes"`
	ConntrackEntries int `json:"conntrackEntries"`
}

func statusOf(c *topology.Cluster) (labStatus, error) {
	s := labStatus{Name: c.Spec.Name, Status: c.Status, Spec: &c.Spec, Hosts: []labHost{}}
	for _, h := range c.Hosts() {
		pids, err := h.Processes()
		entries, err2 := h.ConntrackCount()
		// A cluster that is being created or removed may lack hosts.
		if err := errors.Join(err, err2); err != nil && c.Status == topology.StatusUp {
			return s, fmt.Errorf("%w: run \"spillway-lab lab up\" to repair it", err)
		}
		s.Hosts = append(s.Hosts, labHost{h, len(pids), entries})
	}
	return s, nil
}

func printLabStatus(w io.Writer, all []labStatus, output string) error {
	if output == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(all)
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(w, "no lab clusters: run \"spillway-lab lab up\" to create one")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i, s := range all {
		if i > 0 {
			fmt.Fprintln(t)
		}
		fmt.Fprintf(t, "cluster %s: %s\n", s.Name, s.Status)
		if len(s.Hosts) == 0 {
			continue
		}
		fmt.Fprintln(t, "HOST\tNAMESPACE\tIPV4\tIPV6\tPROCESSES\tCONNTRACK")
		for _, h := range s.Hosts {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\n", h.Name, h.Namespace, addrOrDash(h.IPv4), addrOrDash(h.IPv6),
				h.Processes, h.ConntrackEntries)
		}
	}
	return t.Flush()
}

func addrOrDash(a netip.Addr) string {
	if !a.IsValid() {
		return "-"
	}
	return a.String()
}

func labOutputFlag(cmd *cobra.Command, output *string) {
	cmd.Flags().StringVarP(output, "output", "o", "table", "Output format: table or json.")
}

func checkLabOutput(output string) error {
	if output != "table" && output != "json" {
		return cli.UsageErrorf("--output %q: use table or json", output)
	}
	return nil
}

func parsePrefix(to *netip.Prefix, text string) error {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return fmt.Errorf("lab up: %q is not an address prefix such as 10.0.0.0/16", text)
	}
	*to = p
	return nil
}

func parseFamilies(spec *topology.Spec, families []string) error {
	spec.IPv4, spec.IPv6 = false, false
	for _, f := range families {
		switch strings.ToLower(f) {
		case "ipv4":
			spec.IPv4 = true
		case "ipv6":
			spec.IPv6 = true
		default:
			return fmt.Errorf("lab up: --ip-families %q: use IPv4, IPv6 or both", f)
		}
	}
	return nil
}

// labProgress reports steps after they have taken labPatience together.
func labProgress(w io.Writer) (report func(string), done func()) {
	var mu sync.Mutex
	var current string
	talk := false
	say := func() { fmt.Fprintf(w, "lab: %s ...\n", current) }
	timer := time.AfterFunc(labPatience, func() {
		mu.Lock()
		defer mu.Unlock()
		talk = true
		say()
	})
	return func(step string) {
		mu.Lock()
		defer mu.Unlock()
		current = step
		if talk {
			say()
		}
	}, func() { timer.Stop() }
}
