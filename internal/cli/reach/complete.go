package reach

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
)

// completeTimeout is how long a shell waits for names at most.
const completeTimeout = 2 * time.Second

// names lists names of objects that an agent knows.
type names func(context.Context, nodev1alpha1connect.NodeServiceClient) []string

// Complete makes a shell complete the names of nodes, namespaces, Services and pods in the flags that
// the command has. The agent knows them that the command would ask.
func (f *Flags) Complete(cmd *cobra.Command, socket *nodeclient.Socket) {
	for flag, list := range map[string]names{"namespace": namespaces, "service": Services, "pod": pods, "from": pods, "to": Services} {
		if cmd.Flags().Lookup(flag) != nil {
			cli.Complete(cmd, flag, func() []string { return f.Names(cmd, socket, list) })
		}
	}
	if cmd.Flags().Lookup("node") != nil {
		cli.Complete(cmd, "node", f.nodes)
	}
}

// Names returns the names that the agent knows. A shell completes nothing without its answer, nor from
// several nodes.
func (f *Flags) Names(cmd *cobra.Command, socket *nodeclient.Socket, list names) []string {
	if f.Several() {
		return nil
	}
	d, err := f.Dialer(cmd, socket)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), completeTimeout)
	defer cancel()
	return list(ctx, nodeclient.New(d))
}

// Services lists Services as NAMESPACE/NAME.
func Services(ctx context.Context, agent nodev1alpha1connect.NodeServiceClient) (list []string) {
	services, _ := nodeclient.Services(ctx, agent, "")
	for _, s := range services {
		list = append(list, s.Namespace+"/"+s.Name)
	}
	return list
}

func namespaces(ctx context.Context, agent nodev1alpha1connect.NodeServiceClient) (list []string) {
	services, _ := nodeclient.Services(ctx, agent, "")
	for _, s := range services {
		list = append(list, s.Namespace)
	}
	slices.Sort(list)
	return slices.Compact(list)
}

func pods(ctx context.Context, agent nodev1alpha1connect.NodeServiceClient) (list []string) {
	resp, err := agent.Pods(ctx, &nodev1alpha1.PodsRequest{})
	if err != nil {
		return nil
	}
	for _, p := range resp.Pods {
		list = append(list, p.Namespace+"/"+p.Name)
	}
	return list
}

// nodes lists the nodes of the cluster.
func (f *Flags) nodes() (list []string) {
	c, err := f.Cluster()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), completeTimeout)
	defer cancel()
	agents, _, _ := c.Agents(ctx)
	for _, a := range agents {
		list = append(list, a.Node)
	}
	return list
}
