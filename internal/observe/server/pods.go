package server

import (
	"context"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
)

// mostPods is the number of pods in a response.
const mostPods = 1000

// Pods looks up pods between two turns of reconcile.
func (s service) Pods(ctx context.Context, req *nodev1alpha1.PodsRequest) (*nodev1alpha1.PodsResponse, error) {
	pods, err := s.cfg.State.Pods(ctx, req.Namespace, req.Name)
	if err != nil {
		return nil, err
	}
	limit := mostPods
	if req.Limit > 0 {
		limit = int(min(req.Limit, mostPods))
	}
	resp := &nodev1alpha1.PodsResponse{More: len(pods) > limit}
	for _, p := range pods[:min(len(pods), limit)] {
		out := &nodev1alpha1.Pod{Namespace: p.Namespace, Name: p.Name.Name, Node: p.Node}
		for _, a := range p.Addrs {
			out.Addresses = append(out.Addresses, a.String())
		}
		resp.Pods = append(resp.Pods, out)
	}
	return resp, nil
}
