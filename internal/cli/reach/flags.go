package reach

import (
	"fmt"
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
	Node                           string // "": this node's agent
	kubeconfig, context, namespace string
	atOnce                         int
	// Timeout is for each node.
	Timeout time.Duration
}

// AddNode adds --node and the flags of AddCluster.
func (f *Flags) AddNode(flags *pflag.FlagSet) {
	flags.StringVar(&f.Node, "node", "", "Node whose agent is asked, through the API server (default: this machine's agent).")
	cli.GroupFlags(flags, Group, "node")
	f.AddCluster(flags)
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

// All returns the cluster, for a command that asks all nodes.
func (f *Flags) All(cmd *cobra.Command) (*Cluster, error) {
	if f.Node != "" {
		return nil, cli.UsageErrorf("--all-nodes and --node: one node is asked, or all: give one of the two")
	}
	if err := f.Validate(cmd, true); err != nil {
		return nil, err
	}
	return f.Cluster()
}

// Dialer returns the dialer of the agent that the flags name: --node, or the socket.
func (f *Flags) Dialer(cmd *cobra.Command, socket *nodeclient.Socket) (nodeclient.Dialer, error) {
	if err := f.Validate(cmd, f.Node != ""); err != nil {
		return nodeclient.Dialer{}, err
	}
	if f.Node == "" {
		return socket.Dialer(), nil
	}
	c, err := f.Cluster()
	if err != nil {
		return nodeclient.Dialer{}, err
	}
	return c.Node(f.Node), nil
}

// Validate returns a UsageError for flags that cannot be, and for those of a way to the agent
// that the command does not take: through the cluster, or by the socket.
func (f *Flags) Validate(cmd *cobra.Command, cluster bool) error {
	flags := cmd.Flags()
	for _, name := range append([]string{"node"}, clusterFlags...) {
		flag := flags.Lookup(name)
		if flag == nil || !flag.Changed {
			continue
		}
		if flag.Value.String() == "" {
			return cli.UsageErrorf("--%s: a value is empty", name)
		}
		if !cluster {
			return cli.UsageErrorf("--%s is for the agents of other nodes: give --node too, or --all-nodes", name)
		}
	}
	switch {
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
