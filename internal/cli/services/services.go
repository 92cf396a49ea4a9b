// Package services is the command that shows the Services of a node.
package services

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/facts/model"
)

// NewCommand returns the command services.
func NewCommand() *cobra.Command {
	var socket nodeclient.Socket
	var cluster reach.Flags
	var output cli.Output
	var namespace string
	cmd := &cobra.Command{
		Use:   "services [NAME]",
		Short: "Show the Services that this node serves, or one of them in detail",
		Long: `Shows the Services of this node as its agent serves them. With the name of a Service,
also its endpoints with their state, the policies, and every difference between what was
written and what the kernel holds. FLOWS are those of this node's flow table: with eBPF,
and without connections of its pods and processes that sockets translate. HEALTH is ok, or
the worst that doctor finds about the port. Differences and findings are no failure: the
exit code is 0 if the agent answers. Needs root.

With --node or --all-nodes it asks other nodes' agents through the API server, with the
rights of a kubeconfig. Nodes that have the same are one line. The exit code is 1 if one
of them does not answer.`,
		Example: `  spillway services -n default
  spillway services -n kube-system kube-dns
  spillway services kube-system/kube-dns -o yaml`,
		Args: cli.Arguments("[NAME]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := cli.NotEmpty(cmd.Flags(), "api-socket", "namespace"); err != nil {
				return err
			}
			if err := output.Validate(); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			var request *nodev1alpha1.GetServiceRequest // nil: all Services
			if len(args) > 0 {
				var err error
				if request, err = requestOf(namespace, args[0]); err != nil {
					return err
				}
			}
			if cluster.Several() {
				nodes, err := cluster.Chosen(cmd)
				if err != nil {
					return err
				}
				if request == nil {
					return listAll(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr(), nodes, namespace, output)
				}
				return showAll(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr(), nodes, request, output)
			}
			agent, err := cluster.Dialer(cmd, &socket)
			if err != nil {
				return err
			}
			if request == nil {
				return list(ctx, cmd.OutOrStdout(), agent, namespace, output)
			}
			return show(ctx, cmd.OutOrStdout(), agent, request, output)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVarP(&namespace, "namespace", "n", "", "Namespace of the Services (default: all; of a Service without a namespace: default).")
	socket.AddFlag(f)
	output.AddFlag(cmd)
	cluster.AddNodes(f)
	cluster.Complete(cmd, &socket)
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return cluster.Names(cmd, &socket, reach.Services), cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}

// requestOf returns the request for a Service that is named as NAME or NAMESPACE/NAME. Host ports
// of a Pod are NAMESPACE/pod/NAME, or pod/NAME beside --namespace.
func requestOf(namespace, name string) (*nodev1alpha1.GetServiceRequest, error) {
	before, after, both := strings.Cut(name, "/")
	if _, ofPod := model.PodOf(model.Name{Name: name}); both && (!ofPod || namespace == "" || namespace == before) {
		if namespace != "" && namespace != before {
			return nil, cli.UsageErrorf("services %q: the namespace is not that of --namespace %q: give one of them", name, namespace)
		}
		namespace, name = before, after
	}
	if namespace == "" {
		namespace = "default"
	}
	pod, ofPod := model.PodOf(model.Name{Name: name})
	if !ofPod {
		pod.Name = name
	}
	if pod.Name == "" || strings.Contains(pod.Name, "/") {
		return nil, cli.UsageErrorf("services: not a name: write NAME or NAMESPACE/NAME")
	}
	return &nodev1alpha1.GetServiceRequest{Namespace: namespace, Name: name, CountFlows: true}, nil
}

// list prints the Services of a namespace, "" for all.
func list(ctx context.Context, out io.Writer, agent nodeclient.Dialer, namespace string, output cli.Output) error {
	services, err := nodeclient.Services(ctx, nodeclient.New(agent), namespace)
	if err != nil {
		return nodeclient.Error("list Services", agent, err)
	}
	return output.Print(out, listResult{&nodev1alpha1.ListServicesResponse{Services: services}, namespace})
}

// show prints one Service.
func show(ctx context.Context, out io.Writer, agent nodeclient.Dialer, req *nodev1alpha1.GetServiceRequest, output cli.Output) error {
	ctx, cancel := context.WithTimeout(ctx, nodeclient.Timeout)
	defer cancel()
	client := nodeclient.New(agent)
	resp, err := client.GetService(ctx, req)
	if connect.CodeOf(err) == connect.CodeNotFound {
		known, _ := nodeclient.Services(ctx, client, "") // without them there is no suggestion
		if similar := nearest(req, known); len(similar) > 0 {
			return fmt.Errorf("no Service %s/%s: did you mean %s?", req.Namespace, req.Name, strings.Join(similar, " or "))
		}
	}
	if err != nil {
		return nodeclient.Error(fmt.Sprintf("show Service %s/%s", req.Namespace, req.Name), agent, err)
	}
	if resp.Service == nil {
		return fmt.Errorf("show Service %s/%s: %s answers without it", req.Namespace, req.Name, agent.Where)
	}
	return output.Print(out, oneResult{resp})
}

// mostSimilar is how many Services an error suggests.
const mostSimilar = 3

// nearest returns the Services with the same name in another namespace, else those with similar names:
// of the same namespace first.
func nearest(req *nodev1alpha1.GetServiceRequest, known []*nodev1alpha1.Service) (list []string) {
	in := map[string][]string{}
	var names []string
	for _, s := range known {
		in[s.Name] = append(in[s.Name], s.Namespace)
		names = append(names, s.Name)
	}
	similar := []string{req.Name}
	if in[req.Name] == nil {
		slices.Sort(names)
		similar = cli.Similar(req.Name, slices.Compact(names))
	}
	var others []string
	for _, name := range similar {
		for _, namespace := range in[name] {
			to := &others
			if namespace == req.Namespace {
				to = &list
			}
			*to = append(*to, namespace+"/"+name)
		}
	}
	list = append(list, others...)
	return list[:min(len(list), mostSimilar)]
}
