package sysdump

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/sysdump"
)

// fromCluster collects by the API server.
type fromCluster struct {
	client   kubernetes.Interface
	reach    *reach.Cluster
	redactor *sysdump.Redactor
	objects  bool // Services and EndpointSlices themselves, not only their number
}

// Bounds of lists and logs.
const (
	mostAgents    = 100
	mostEvents    = 500
	pageSize      = 500
	logLines      = 5000
	mostObjects   = 20000
	agentFilePart = "cluster/agents/"
)

// collectors returns those of the cluster. The agents' states and logs are files of their own,
// so the list of agents is read first; if it cannot be read, only its collector fails.
func (c *fromCluster) collectors(ctx context.Context) []sysdump.Collector {
	list := []sysdump.Collector{
		{File: "cluster/version.json", About: "version of the API server", Collect: func(_ context.Context, w io.Writer) error {
			v, err := c.client.Discovery().ServerVersion()
			if err != nil {
				return err
			}
			return writeJSON(w, v)
		}},
		{File: "cluster/nodes.json", About: "Nodes, without annotations", Collect: c.nodes},
		{File: "cluster/agents.json", About: fmt.Sprintf("Pods of the agents, at most %d, without values of their environment", mostAgents), Collect: c.agents},
		{File: "cluster/events.json", About: fmt.Sprintf("Events of Spillway and of its Pods, at most %d", mostEvents), Collect: c.events},
		{File: "cluster/counts.json", About: "numbers of Services and EndpointSlices", Collect: c.counts},
	}
	if c.objects {
		list = append(list,
			sysdump.Collector{File: "cluster/services.jsonl", About: fmt.Sprintf("Services, at most %d, without annotations", mostObjects), Collect: c.services},
			sysdump.Collector{File: "cluster/endpointslices.jsonl", About: fmt.Sprintf("EndpointSlices, at most %d, without annotations", mostObjects), Collect: c.slices})
	}
	ctx, cancel := context.WithTimeout(ctx, 2*podsTimeout)
	defer cancel()
	agents, _, err := c.reach.Agents(ctx)
	if err != nil {
		list = append(list, sysdump.Collector{File: "cluster/agents", About: "states of the agents", Collect: func(context.Context, io.Writer) error { return err }})
	}
	// agents.json has those that do not run.
	agents = slices.DeleteFunc(agents, func(a reach.Agent) bool { return a.Err != nil })
	agents = agents[:min(len(agents), mostAgents)]
	list = append(list, c.apiCollectors(agents, stateParts)...)
	pods, _, _ := c.listAgents(ctx) // agents.json has the error
	for _, p := range pods {
		for _, previous := range []bool{false, true} {
			if previous && !restarted(p) {
				continue
			}
			file, about := agentFilePart+p.Spec.NodeName+".log", "end of the agent's log on "+p.Spec.NodeName
			if previous {
				file, about = agentFilePart+p.Spec.NodeName+"-previous.log", about+", before its restart"
			}
			list = append(list, sysdump.Collector{File: file, About: about, Collect: func(ctx context.Context, w io.Writer) error {
				return c.log(ctx, w, p, previous)
			}})
		}
	}
	return append(list, c.apiCollectors(agents, trafficParts)...)
}

// listAgents returns the first Pods of the agents, and why others with their label are missing.
func (c *fromCluster) listAgents(ctx context.Context) (pods []*corev1.Pod, missing, err error) {
	found, err := c.reach.Pods(ctx)
	if err != nil {
		return nil, nil, err
	}
	switch n := len(found.Unproven); {
	case n > 1:
		missing = fmt.Errorf("%w; %d more like it", found.Unproven[0].Err, n-1)
	case n == 1:
		missing = found.Unproven[0].Err
	}
	return found.Agents[:min(len(found.Agents), mostAgents)], missing, nil
}

// restarted reports that the agent's container has run before.
func restarted(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.Name == agentContainer && s.RestartCount > 0 })
}

const agentContainer = "agent"

func (c *fromCluster) log(ctx context.Context, w io.Writer, p *corev1.Pod, previous bool) error {
	lines, bytes := int64(logLines), int64(sysdump.DefaultFileLimit)
	stream, err := c.client.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{
		Container: agentContainer, Previous: previous, TailLines: &lines, LimitBytes: &bytes, Timestamps: true,
	}).Stream(ctx)
	if err != nil {
		return err
	}
	defer stream.Close()
	_, err = io.Copy(w, stream)
	return err
}

// bareMeta removes what a bug report does not need, and what may have secrets.
func bareMeta(m *metav1.ObjectMeta) {
	m.Annotations, m.ManagedFields = nil, nil
}

func (c *fromCluster) nodes(ctx context.Context, w io.Writer) error {
	nodes, err := reach.List[*corev1.Node](ctx, metav1.ListOptions{}, c.client.CoreV1().Nodes().List)
	if err != nil {
		return err
	}
	for _, n := range nodes {
		bareMeta(&n.ObjectMeta)
		n.Status.Images = nil
	}
	return writeJSON(w, nodes)
}

// agents writes the Pods of the agents.
func (c *fromCluster) agents(ctx context.Context, w io.Writer) error {
	pods, missing, err := c.listAgents(ctx)
	if err != nil {
		return err
	}
	for _, p := range pods {
		barePod(p, c.redactor)
	}
	return cmp.Or(writeJSON(w, pods), missing)
}

// barePod removes annotations and all values of environments: a program may read a secret
// from any variable.
func barePod(p *corev1.Pod, r *sysdump.Redactor) {
	bareMeta(&p.ObjectMeta)
	p.Spec.EphemeralContainers = nil
	for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			c := &list[i]
			c.Lifecycle = nil
			for j := range c.Env {
				if c.Env[j].Value != "" {
					c.Env[j].Value = sysdump.Mark
				}
			}
			c.Args, c.Command = r.Args(c.Args), r.Args(c.Command)
			for _, probe := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
				if probe != nil && probe.HTTPGet != nil {
					probe.HTTPGet.HTTPHeaders = nil
				}
			}
		}
	}
}

// events writes Events that Spillway reported, and those about its Pods.
func (c *fromCluster) events(ctx context.Context, w io.Writer) error {
	var found []corev1.Event
	for next := ""; ; {
		list, err := c.client.CoreV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{Limit: pageSize, Continue: next})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if strings.Contains(e.ReportingController+e.Source.Component+e.InvolvedObject.Name, "spillway") {
				bareMeta(&e.ObjectMeta)
				found = append(found, e)
			}
		}
		if next = list.Continue; next == "" {
			break
		}
	}
	slices.SortStableFunc(found, func(a, b corev1.Event) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	return writeJSON(w, found[max(0, len(found)-mostEvents):])
}

// counts writes numbers. The server knows how many EndpointSlices remain after the first.
func (c *fromCluster) counts(ctx context.Context, w io.Writer) error {
	services := map[string]int{}
	headless := 0
	if err := c.eachService(ctx, func(s *corev1.Service) error {
		services[string(cmp.Or(s.Spec.Type, corev1.ServiceTypeClusterIP))]++
		if s.Spec.ClusterIP == corev1.ClusterIPNone {
			headless++
		}
		return nil
	}); err != nil {
		return err
	}
	list, err := c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return err
	}
	n := len(list.Items)
	if list.RemainingItemCount != nil {
		n += int(*list.RemainingItemCount)
	}
	return writeJSON(w, map[string]any{"services": services, "headless": headless, "endpointSlices": n})
}

func (c *fromCluster) eachService(ctx context.Context, each func(*corev1.Service) error) error {
	for next, n := "", 0; n < mostObjects; {
		list, err := c.client.CoreV1().Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{Limit: pageSize, Continue: next})
		if err != nil {
			return err
		}
		for i := range list.Items {
			if err := each(&list.Items[i]); err != nil {
				return err
			}
		}
		n += len(list.Items)
		if next = list.Continue; next == "" {
			return nil
		}
	}
	return nil
}

func (c *fromCluster) services(ctx context.Context, w io.Writer) error {
	return c.eachService(ctx, func(s *corev1.Service) error {
		bareMeta(&s.ObjectMeta)
		return writeLine(w, s)
	})
}

func (c *fromCluster) slices(ctx context.Context, w io.Writer) error {
	for next, n := "", 0; n < mostObjects; {
		list, err := c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll).List(ctx, metav1.ListOptions{Limit: pageSize, Continue: next})
		if err != nil {
			return err
		}
		for i := range list.Items {
			bareMeta(&list.Items[i].ObjectMeta)
			if err := writeLine(w, &list.Items[i]); err != nil {
				return err
			}
		}
		n += len(list.Items)
		if next = list.Continue; next == "" {
			return nil
		}
	}
	return nil
}
