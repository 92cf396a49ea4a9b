package sysdump

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
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
	mostEvent     = 4000 // bytes of one Event, so that mostEvents of them fit into a file
	mostObjects   = sysdump.DefaultFileLimit * 7 / 8
	listTimeout   = sysdump.DefaultTimeout * 3 / 4 // leaves time to write what was read
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
		{File: "cluster/agents.json", About: fmt.Sprintf("Pods of the agents, at most %d, without values of their environment", mostAgents),
			Collect: c.agents},
		{File: "cluster/events.json", About: fmt.Sprintf("Events of Spillway and of its Pods, at most %d, which namespaces share", mostEvents),
			Collect: c.events},
		{File: "cluster/counts.json", About: "numbers of Services and EndpointSlices", Collect: c.counts},
	}
	if c.objects {
		list = append(list,
			sysdump.Collector{File: "cluster/services.jsonl",
				About: "Services, without annotations; namespaces share the size", Collect: c.services},
			sysdump.Collector{File: "cluster/endpointslices.jsonl",
				About: "EndpointSlices, without annotations; namespaces share the size", Collect: c.slices})
	}
	ctx, cancel := context.WithTimeout(ctx, 2*podsTimeout)
	defer cancel()
	agents, _, err := c.reach.Agents(ctx)
	if err != nil {
		list = append(list, sysdump.Collector{File: "cluster/agents", About: "states of the agents",
			Collect: func(context.Context, io.Writer) error { return err }})
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
	switch n := len(found.Unverified); {
	case n > 1:
		missing = fmt.Errorf("%w; %d more like it", found.Unverified[0].Err, n-1)
	case n == 1:
		missing = found.Unverified[0].Err
	}
	return found.Agents[:min(len(found.Agents), mostAgents)], missing, nil
}

// restarted reports that the agent's container has run before.
func restarted(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.ContainerStatuses,
		func(s corev1.ContainerStatus) bool { return s.Name == agentContainer && s.RestartCount > 0 })
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

// events writes Events that Spillway reported, and those about its Pods. Other authors can write such
// Events too, so each is redacted by itself.
func (c *fromCluster) events(ctx context.Context, w io.Writer) error {
	found, large := newShares(mostEvents), 0
	err := eachPage(ctx, c.client.CoreV1().Events(metav1.NamespaceAll).List, func(list *corev1.EventList) (string, error) {
		for i := range list.Items {
			e := &list.Items[i]
			if !strings.Contains(e.ReportingController+e.Source.Component+e.InvolvedObject.Name, "spillway") {
				continue
			}
			bareMeta(&e.ObjectMeta)
			text, err := json.Marshal(e)
			if err != nil {
				return "", err
			}
			if len(text) <= mostEvent {
				text = []byte(c.redactor.Text(string(text)))
			}
			if len(text) > mostEvent || !json.Valid(text) {
				large++
				continue
			}
			found.add(e.Namespace, line{rank: -e.CreationTimestamp.Unix(), weight: 1, text: text})
		}
		return list.Continue, nil
	})
	if large > 0 {
		err = errors.Join(err, fmt.Errorf("%d Events are missing: larger than %d bytes, or with a part of a key", large, mostEvent))
	}
	events := []json.RawMessage{}
	for _, l := range slices.Backward(found.lines()) {
		events = append(events, l.text)
	}
	return errors.Join(writeJSON(w, events), err)
}

// counts writes numbers. The server knows how many EndpointSlices remain after the first.
func (c *fromCluster) counts(ctx context.Context, w io.Writer) error {
	services := map[string]int{}
	headless := 0
	failed := c.eachService(ctx, func(s *corev1.Service) error {
		services[string(cmp.Or(s.Spec.Type, corev1.ServiceTypeClusterIP))]++
		if s.Spec.ClusterIP == corev1.ClusterIPNone {
			headless++
		}
		return nil
	})
	list, err := c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return err
	}
	n := len(list.Items)
	if list.RemainingItemCount != nil {
		n += int(*list.RemainingItemCount)
	}
	return errors.Join(writeJSON(w, map[string]any{"services": services, "headless": headless, "endpointSlices": n}), failed)
}

func (c *fromCluster) eachService(ctx context.Context, each func(*corev1.Service) error) error {
	return eachPage(ctx, c.client.CoreV1().Services(metav1.NamespaceAll).List, func(list *corev1.ServiceList) (string, error) {
		for i := range list.Items {
			if err := each(&list.Items[i]); err != nil {
				return "", err
			}
		}
		return list.Continue, nil
	})
}

// eachPage reads a list in pages, for listTimeout at most. use returns what names the next page.
func eachPage[L any](ctx context.Context, list func(context.Context, metav1.ListOptions) (L, error), use func(L) (string, error)) error {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	for next := ""; ; {
		page, err := list(ctx, metav1.ListOptions{Limit: pageSize, Continue: next})
		if err != nil {
			return err
		}
		if next, err = use(page); err != nil || next == "" {
			return err
		}
	}
}

func (c *fromCluster) services(ctx context.Context, w io.Writer) error {
	lines := newShares(mostObjects)
	err := c.eachService(ctx, func(s *corev1.Service) error { return addObject(lines, &s.ObjectMeta, s) })
	return errors.Join(writeLines(w, lines), err)
}

func (c *fromCluster) slices(ctx context.Context, w io.Writer) error {
	lines := newShares(mostObjects)
	err := eachPage(ctx, c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll).List,
		func(list *discoveryv1.EndpointSliceList) (string, error) {
			for i := range list.Items {
				if err := addObject(lines, &list.Items[i].ObjectMeta, &list.Items[i]); err != nil {
					return "", err
				}
			}
			return list.Continue, nil
		})
	return errors.Join(writeLines(w, lines), err)
}

// addObject adds an object; the first of each namespace stay.
func addObject(lines *shares, m *metav1.ObjectMeta, object any) error {
	bareMeta(m)
	text, err := json.Marshal(object)
	if err == nil {
		lines.added++
		lines.add(m.Namespace, line{rank: lines.added, weight: len(text) + 1, text: append(text, '\n')})
	}
	return err
}

// writeLines writes the lines that are left, and says how many are not.
func writeLines(w io.Writer, lines *shares) error {
	left := lines.lines()
	for _, l := range left {
		if _, err := w.Write(l.text); err != nil {
			return err
		}
	}
	if missing := int(lines.added) - len(left); missing > 0 {
		return fmt.Errorf("%d of %d objects do not fit", missing, lines.added)
	}
	return nil
}
