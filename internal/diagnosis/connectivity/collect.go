package connectivity

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxLog bounds the bytes that are read of a client's log.
const maxLog = 1 << 20

// waitFor waits until every Pod of a role is as wanted. With an error it also returns the
// Pods as they are.
func (r *run) waitFor(ctx context.Context, role string, done func(*corev1.Pod) bool) (map[string]*corev1.Pod, error) {
	pods := map[string]*corev1.Pod{}
	var failed error
	for {
		list, err := r.Client.CoreV1().Pods(r.namespace).List(ctx, metav1.ListOptions{LabelSelector: roleLabel + "=" + role})
		if err == nil {
			var open []string
			for i := range list.Items {
				p := &list.Items[i]
				pods[p.Name] = p
				if !done(p) {
					open = append(open, fmt.Sprintf("%s on %s: %s", p.Name, p.Spec.NodeName, state(p)))
				}
			}
			r.Part(len(list.Items)-len(open), len(list.Items))
			if len(open) == 0 {
				return pods, nil
			}
			failed = errors.New(open[0])
			if len(open) > 1 {
				failed = fmt.Errorf("%s; %d more do not run either", open[0], len(open)-1)
			}
		} else if ctx.Err() == nil {
			failed = fmt.Errorf("list Pods: %w", err)
		}
		select {
		case <-ctx.Done():
			return pods, cmp.Or(failed, ctx.Err())
		case <-time.After(poll):
		}
	}
}

// ended reports that a Pod's container has ended.
func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// state describes a Pod that does not run: the reason that Kubernetes gives, if any.
func state(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil {
			return strings.TrimSuffix(w.Reason+": "+w.Message, ": ")
		}
		if t := c.State.Terminated; t != nil && t.ExitCode != 0 {
			return fmt.Sprintf("ended with exit code %d: %s", t.ExitCode, strings.TrimSpace(t.Message))
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Status == corev1.ConditionFalse && c.Message != "" {
			return strings.TrimSuffix(c.Reason+": "+c.Message, ": ")
		}
	}
	return string(p.Status.Phase)
}

// collect waits for the clients and reads their results. A client that did not start or end
// fails all its questions without a result.
func (r *run) collect(ctx context.Context) error {
	total := 0
	for _, plan := range r.plans {
		total += len(plan.Asks)
	}
	r.Step("asking %d questions", total)
	pods, _ := r.waitFor(ctx, roleClient, ended) // an error is a client's, whose checks fail
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err() // an interrupt: no report is wanted
	}
	// The time for results may have passed; those that are there are read.
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer stop()
	for _, c := range r.clients {
		results, err := r.results(ctx, c.name)
		missing := "the client did not run"
		if p := pods[c.name]; err != nil {
			missing = "read log: " + err.Error()
		} else if p != nil {
			missing = "no result: " + c.name + ": " + state(p)
		}
		for i, ask := range r.plans[c.name].Asks {
			got, ok := results[i]
			if !ok {
				got = missing
			}
			r.report.add(r.world.targets[c.node].node, c, ask, got)
		}
	}
	r.report.finish(len(r.world.targets))
	return nil
}

// results reads the results in a client's log.
func (r *run) results(ctx context.Context, name string) (map[int]string, error) {
	text, err := r.logs(ctx, name)
	if err != nil {
		return nil, err
	}
	return parseResults(text), nil
}

func (r *run) readLog(ctx context.Context, pod string) ([]byte, error) {
	limit := int64(maxLog)
	return r.Client.CoreV1().Pods(r.namespace).GetLogs(pod, &corev1.PodLogOptions{LimitBytes: &limit}).DoRaw(ctx)
}

// parseResults reads the lines of a log that are results. A last line that was cut off is
// none.
func parseResults(text []byte) map[int]string {
	results := map[int]string{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, maxLog)
	for lines.Scan() {
		result := Result{Ask: -1}
		if json.Unmarshal(lines.Bytes(), &result) == nil && result.Ask >= 0 {
			results[result.Ask] = result.Got
		}
	}
	return results
}
