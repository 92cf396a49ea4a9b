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
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// labPatience is the time after which the lab starts to print its steps.
const labPatience = 2 * time.Second

// NewCommand returns the command lab.
func NewCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Run published experiments, or create a cluster of network namespaces, on this machine",
		Example: `  spillway-lab lab run all --quick
  spillway-lab lab up && spillway-lab lab status`,
	}
	cmd.AddCommand(newUpCommand(), newDownCommand(), newExecCommand(), newStatusCommand(),
		newNodesCommand(), newServeCommand(), newAskCommand(),
		newRunCommand(), newListCommand(), newDiffCommand(), newReportCommand(), newHeadlineCommand(), newRestoreCommand())
	return cli.Group(cmd)
}

func newUpCommand() *cobra.Command {
	spec := topology.DefaultSpec("lab")
	spec.ExternalRanges = nil
	var output cli.Output
	var lan4, lan6, cidr4, cidr6 string
	var ranges, families []string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Create a cluster, or repair it",
		Example: `  spillway-lab lab up
  spillway-lab lab up --name big --nodes 3 --pods 5 --pod-network vxlan`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
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
			if err == nil {
				err = spec.Validate()
			}
			if err != nil {
				return cli.UsageErrorf("%v", err)
			}
			return labUp(cmd, spec, output)
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &spec.Name, spec.Name, "Name of the cluster.")
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
	output.AddFlag(cmd)
	cli.Choices(cmd, "pod-network", topology.Routed, topology.VXLAN)
	cli.Choices(cmd, "ip-families", "IPv4", "IPv6")
	cli.Choices(cmd, "rp-filter", "0", "1", "2")
	cli.GroupFlags(f, "Size", "nodes", "pods", "clients", "zones")
	cli.GroupFlags(f, "Network", "pod-network", "ip-families", "lan4", "lan6", "cluster-cidr4", "cluster-cidr6",
		"external-ranges", "rp-filter", "masquerade", "conntrack")
	return cmd
}

// completeClusters makes a shell complete the names of this machine's clusters.
func completeClusters(cmd *cobra.Command) {
	cli.Complete(cmd, "name", func() []string {
		names, _ := topology.List() // a user without rights sees none
		return names
	})
}

func labUp(cmd *cobra.Command, spec topology.Spec, output cli.Output) error {
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
	return output.Print(cmd.OutOrStdout(), labStatuses{s})
}

func newDownCommand() *cobra.Command {
	var name string
	var all bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Stop a cluster's processes and remove it; no error if there is none",
		Example: `  spillway-lab lab down
  spillway-lab lab down --all`,
		Args: cli.Arguments(),
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
	harness.NameFlag(cmd.Flags(), &name, "lab", "Name of the cluster.")
	cmd.Flags().BoolVar(&all, "all", false, "Remove every cluster of this machine.")
	completeClusters(cmd)
	return cmd
}

func newStatusCommand() *cobra.Command {
	var name string
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show clusters, their hosts, and the processes in them",
		Example: `  spillway-lab lab status
  spillway-lab lab status --name lab -o json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
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
			all := labStatuses{}
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
			return output.Print(cmd.OutOrStdout(), all)
		},
	}
	harness.NameFlag(cmd.Flags(), &name, "", "Name of the cluster (default: all).")
	completeClusters(cmd)
	output.AddFlag(cmd)
	return cmd
}

func newNodesCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "nodes",
		Short: "Print a cluster's Nodes as a Kubernetes manifest",
		Example: `  spillway-lab lab nodes
  spillway-lab lab nodes --name big`,
		Args: cli.Arguments("[CLUSTER]"), // for compatibility
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if cmd.Flags().Changed("name") {
					return cli.UsageErrorf("lab nodes %s and --name: give one of them", args[0])
				}
				if name = args[0]; topology.ValidName(name) != nil {
					return cli.UsageErrorf("cluster %q: %v", name, topology.ErrName)
				}
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
	harness.NameFlag(cmd.Flags(), &name, "lab", "Name of the cluster.")
	completeClusters(cmd)
	return cmd
}

func newServeCommand() *cobra.Command {
	var c workload.Config
	cmd := &cobra.Command{
		Use:   "serve http|dns|tcp|udp|tftp",
		Short: "Run a server that returns its name and its client's address, until SIGTERM",
		Example: `  spillway-lab lab serve tcp --listen :7000 --name pod0
  spillway-lab lab exec node0-pod0 -- spillway-lab lab serve http --listen :80`,
		Args:      cli.Arguments("kind of server"),
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
		Long: `Queries a lab server for its name and the client address that it sees, and prints them
as JSON. The exit code is 1 if the server did not answer.`,
		Example: `  spillway-lab lab ask tcp 10.244.0.2:7000
  spillway-lab lab exec client0 -- spillway-lab lab ask http 172.30.0.10:30080`,
		Args:      cli.Arguments("kind of server", "ADDRESS:PORT"),
		ValidArgs: []string{workload.HTTP, workload.TCP, workload.UDP},
		RunE: func(cmd *cobra.Command, args []string) error {
			q.Kind, q.To = args[0], args[1]
			if err := q.Validate(); err != nil {
				return cli.UsageErrorf("%v", err)
			}
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

// labStatus describes a cluster.
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

// labStatuses is the output of status and up.
type labStatuses []labStatus

// Write prints the clusters as text.
func (all labStatuses) Write(w io.Writer) error {
	if len(all) == 0 {
		_, err := fmt.Fprintln(w, "no lab clusters: run \"spillway-lab lab up\" to create one")
		return err
	}
	for i, s := range all {
		if i > 0 {
			fmt.Fprintln(w)
		}
		t := page.NewTable(page.Text("HOST"), page.Text("IPV4"), page.Text("IPV6"),
			page.Number("PROCS"), page.Number("CONNTRACK"), page.Column{Name: "NAMESPACE", Least: 10, Cut: true})
		for _, h := range s.Hosts {
			t.Row(h.Name, addrOrDash(h.IPv4), addrOrDash(h.IPv6), h.Processes, h.ConntrackEntries, h.Namespace)
		}
		t.Foot("cluster %s: %s, %d hosts", s.Name, s.Status, len(s.Hosts))
		if err := t.Write(w); err != nil {
			return err
		}
	}
	return nil
}

func addrOrDash(a netip.Addr) string {
	if !a.IsValid() {
		return "-"
	}
	return a.String()
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
