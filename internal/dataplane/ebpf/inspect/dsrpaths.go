package inspect

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// dsrOf reports whether the endpoint's node answers the client of a flow itself, and whether
// this is the node that received the flow: dsr_remote of bpf/lib/dsr/flow.h.
func dsrOf(f *objects.TCFlow) (direct, oneWay bool) {
	const toPods = objects.TCFlowFlagsFLOW_TO_POD | objects.TCFlowFlagsFLOW_REVERSE_TO_POD
	flags := objects.TCFlowFlags(f.Flags)
	direct = flags&objects.TCFlowFlagsFLOW_DSR != 0
	return direct, direct && flags&toPods == 0
}

// pathState reports whether replies fail, and whether the programs send packets along the path in
// spite of that: dsr_path_works of bpf/lib/dsr/path.h.
func pathState(p *objects.TCDsrPath, now uint32) (broken, trusted bool) {
	broken = p.Failures >= uint32(objects.TCDsrPathLimitDSR_FAILURES)
	return broken, !broken || now-p.Failed > uint32(objects.TCDsrPathLimitDSR_RETRY_SECONDS)
}

func describePath(p *objects.TCDsrPath, of objects.TCBackend, now uint32) dataplane.DSRPath {
	clock := time.Now()
	at := func(seconds uint32) (t time.Time) {
		if seconds != 0 {
			t = clock.Add(-time.Duration(int32(now-seconds)) * time.Second)
		}
		return t
	}
	out := dataplane.DSRPath{Endpoint: objects.EndpointOf(of), Failures: p.Failures, Failed: at(p.Failed), Answered: at(p.Answered)}
	out.Broken, out.Trusted = pathState(p, now)
	return out
}

// DSRPaths reads the paths to endpoints that their Services still have.
func DSRPaths(m map[string]*ebpf.Map) (list []dataplane.DSRPath, err error) {
	now := objects.BootSeconds()
	err = objects.Each(m[objects.TCMapDsrPaths], func(id uint32, p objects.TCDsrPath) {
		var of objects.TCBackend
		if m[objects.TCMapBackends].Lookup(id, &of) == nil {
			list = append(list, describePath(&p, of, now))
		}
	})
	return list, err
}

// ThroughStack lists those of some Pods of this node, behind Services with DSR, whose
// packets traverse the stack: needs_stack of bpf/lib/flow/plan.h, as serve_dsr calls it.
func ThroughStack(m map[string]*ebpf.Map, pods []netip.AddrPort) ([]netip.AddrPort, error) {
	const bypasses = objects.TCPodFlagsPOD_REACHABLE
	var s objects.TCSettings
	if err := m[objects.TCMapNodeSettings].Lookup(uint32(0), &s); err != nil {
		return nil, fmt.Errorf("read eBPF map %s: %w", objects.TCMapNodeSettings, err)
	}
	never := objects.TCSettingsFlags(s.Flags)&objects.TCSettingsFlagsSETTING_BYPASS_NEVER != 0
	return slices.DeleteFunc(pods, func(at netip.AddrPort) bool {
		var pod objects.TCPod
		_ = m[objects.TCMapPods].Lookup(objects.AddrKey(at.Addr()), &pod) // without an entry, the stack finds the Pod
		return !never && objects.TCPodFlags(pod.Flags)&(bypasses|objects.TCPodFlagsPOD_TRAVERSES_NETFILTER) == bypasses
	}), nil
}
