package reach

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/escape"
)

// Flags are the flags of commands that reach agents through the API server.
type Flags struct {
	// Nodes are the chosen nodes. Without them and AllNodes, this machine's agent is asked.
	Nodes                          []string
	AllNodes                       bool
	kubeconfig, context, namespace string
	alsoNames                      bool
	atOnce                         int
	// Timeout is for each node.
	Timeout time.Duration
}

// AddNodes adds --node, --all-nodes and the flags of AddCluster.
func (f *Flags) AddNodes(flags *pflag.FlagSet) {
	f.addNode(flags, "Node whose agent is asked, through the API server; may be given several times (default: this machine's agent).")
	f.addAllNodes(flags, false)
	f.AddCluster(flags)
}

// AddAllNodes is AddNodes for a command that asks all nodes unless --node chooses some.
func (f *Flags) AddAllNodes(flags *pflag.FlagSet) {
	f.addNode(flags, "Node whose agent is asked; may be given several times (default: all nodes).")
	f.addAllNodes(flags, true)
	f.AddCluster(flags)
}

// AddOneNode is AddNodes for a command that runs on a single node. Without --node, it looks up names
// by the Kubeconfig.
func (f *Flags) AddOneNode(flags *pflag.FlagSet, use string) {
	f.alsoNames = true
	f.addNode(flags, use)
	f.AddCluster(flags)
}

// Kubeconfig is the value of --kubeconfig.
func (f *Flags) Kubeconfig() string { return f.kubeconfig }

func (f *Flags) addNode(flags *pflag.FlagSet, use string) {
	flags.StringSliceVar(&f.Nodes, "node", nil, use)
	cli.GroupFlags(flags, Group, "node")
}

func (f *Flags) addAllNodes(flags *pflag.FlagSet, all bool) {
	flags.BoolVar(&f.AllNodes, "all-nodes", all, "Ask the agents of all nodes.")
	cli.GroupFlags(flags, Group, "all-nodes")
}

// Group is the group of these flags in the help.
const Group = "Cluster"

// AddCluster adds the flags that find the cluster and its agents.
func (f *Flags) AddCluster(flags *pflag.FlagSet) {
	flags.StringVar(&f.kubeconfig, "kubeconfig", "", "Kubeconfig `file` (default: as kubectl, or the Pod's account).")
	flags.StringVar(&f.context, "context", "", "Context of the kubeconfig (default: its current one).")
	AddNamespace(flags, &f.namespace)
	flags.IntVar(&f.atOnce, "nodes-at-once", 10, "Number of nodes asked at the same time.")
	flags.DurationVar(&f.Timeout, "node-timeout", 15*time.Second, "Timeout for each node.")
	cli.GroupFlags(flags, Group, clusterFlags...)
}

// AddNamespace adds --agent-namespace.
func AddNamespace(flags *pflag.FlagSet, namespace *string) {
	flags.StringVar(namespace, "agent-namespace", "", "Namespace of the agents (default: that of their ClusterRoleBinding, else kube-system).")
	cli.GroupFlags(flags, Group, "agent-namespace")
}

var clusterFlags = []string{"kubeconfig", "context", "agent-namespace", "nodes-at-once", "node-timeout"}

// Local reports whether this machine's agent is asked.
func (f *Flags) Local() bool { return !f.AllNodes && len(f.Nodes) == 0 }

// Several reports whether answers of more than one node may come, which Chosen has.
func (f *Flags) Several() bool { return f.AllNodes || len(f.Nodes) > 1 }

// Chosen returns the nodes that --node or --all-nodes names.
func (f *Flags) Chosen(cmd *cobra.Command) (*Nodes, error) {
	if err := f.Validate(cmd, true); err != nil {
		return nil, err
	}
	c, err := f.Cluster()
	if err != nil {
		return nil, err
	}
	return &Nodes{Cluster: c, names: f.Nodes}, nil
}

// Dialer returns the dialer of the one agent that the flags name: --node, or the socket.
func (f *Flags) Dialer(cmd *cobra.Command, socket *nodeclient.Socket) (nodeclient.Dialer, error) {
	if err := f.Validate(cmd, !f.Local()); err != nil {
		return nodeclient.Dialer{}, err
	}
	if f.Local() {
		return socket.Dialer(), nil
	}
	c, err := f.Cluster()
	if err != nil {
		return nodeclient.Dialer{}, err
	}
	return c.Node(f.Nodes[0]), nil
}

// Validate returns a UsageError for flags that cannot be, and for those of a way to the agent
// that the command does not take: through the cluster, or by the socket.
func (f *Flags) Validate(cmd *cobra.Command, cluster bool) error {
	flags := cmd.Flags()
	if len(f.Nodes) > 0 && f.AllNodes {
		if flags.Changed("all-nodes") {
			return cli.UsageErrorf("--all-nodes and --node: chosen nodes are asked, or all: give one of the two")
		}
		f.AllNodes = false // a command that asks all nodes by default
	}
	if err := cli.NotEmpty(flags, slices.DeleteFunc([]string{"node"}, func(n string) bool { return flags.Lookup(n) == nil })...); err != nil {
		return err
	}
	for _, name := range clusterFlags {
		flag := flags.Lookup(name)
		if flag == nil || !flag.Changed {
			continue
		}
		if flag.Value.String() == "" {
			return cli.UsageErrorf("--%s: a value is empty", name)
		}
		if !cluster && !(f.alsoNames && name == "kubeconfig") {
			return cli.UsageErrorf("--%s is for the agents of other nodes: give --node too, or --all-nodes", name)
		}
	}
	switch {
	case f.alsoNames && len(f.Nodes) > 1:
		return cli.UsageErrorf("--node: %d nodes: this command runs on one", len(f.Nodes))
	case cluster && flags.Changed("api-socket"):
		return cli.UsageErrorf("--api-socket is for this machine's agent: remove it, or --node and --all-nodes")
	case f.atOnce < 1:
		return cli.UsageErrorf("--nodes-at-once %d: must be 1 or more", f.atOnce)
	case f.Timeout <= 0:
		return cli.UsageErrorf("--node-timeout %s: must be longer than 0", f.Timeout)
	}
	return nil
}

// Cluster returns the cluster that the flags name. It sends no request.
func (f *Flags) Cluster() (*Cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = f.kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules,
		&clientcmd.ConfigOverrides{CurrentContext: f.context, ClusterInfo: clientcmdapi.Cluster{}})
	config, err := loader.ClientConfig()
	if err != nil {
		if clientcmd.IsEmptyConfig(err) {
			return nil, fmt.Errorf("read kubeconfig: no cluster is configured: set --kubeconfig FILE or the variable KUBECONFIG")
		}
		return nil, fmt.Errorf("read kubeconfig: %s: fix --kubeconfig or --context", strings.TrimSuffix(escape.OneLine(err), ":"))
	}
	config.UserAgent = cli.UserAgent()
	config.QPS, config.Burst = 50, 100
	return New(Config{REST: config, Namespace: f.namespace, AtOnce: f.atOnce, Timeout: f.Timeout})
}
