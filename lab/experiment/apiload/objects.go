package apiload

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"spillway.dev/spillway/test/testbed/controlplane"
)

const namespace = "apiload"

// writers is the number of concurrent requests that create and change objects.
const writers = 16

func nodeName(i int) string { return "node-" + strconv.Itoa(i) }

// crowd is the Services and EndpointSlices.
func (c Config) crowd() controlplane.Crowd {
	w := controlplane.Crowd{Namespace: namespace, Services: c.Services, Endpoints: c.Endpoints}
	for i := range c.Nodes {
		w.Nodes = append(w.Nodes, nodeName(i))
	}
	return w
}

// populate creates all objects.
func populate(ctx context.Context, k kubernetes.Interface, cfg Config) error {
	if err := cfg.crowd().Create(ctx, k); err != nil {
		return err
	}
	if err := each(ctx, cfg.Nodes, func(ctx context.Context, i int) error {
		n := node(i, time.Unix(0, 0))
		if _, err := k.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{FieldManager: "kubelet"}); err != nil {
			return fmt.Errorf("create Node %d: %w", i, err)
		}
		return beat(ctx, k, i, time.Unix(0, 0))
	}); err != nil {
		return err
	}
	return each(ctx, cfg.Agents*cfg.Pods, func(ctx context.Context, i int) error {
		p := pod(i, nodeName(i/cfg.Pods))
		if _, err := k.CoreV1().Pods(namespace).Create(ctx, p, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create Pod %d: %w", i, err)
		}
		if _, err := k.CoreV1().Pods(namespace).UpdateStatus(ctx, p, metav1.UpdateOptions{FieldManager: "kubelet"}); err != nil {
			return fmt.Errorf("write status of Pod %d: %w", i, err)
		}
		return nil
	})
}

// each calls f for the numbers below n, several at once.
func each(ctx context.Context, n int, f func(context.Context, int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return f(ctx, i) })
	}
	return g.Wait()
}

// changeEndpoint makes the first endpoint of a slice unready, or ready again.
func changeEndpoint(ctx context.Context, k kubernetes.Interface, crowd controlplane.Crowd, i int, ready bool) error {
	s := crowd.Slice(i)
	s.Endpoints[0].Conditions.Ready = ptr.To(ready)
	if _, err := k.DiscoveryV1().EndpointSlices(namespace).Update(ctx, s, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("change EndpointSlice %d: %w", i, err)
	}
	return nil
}

// beat writes a Node's status as a kubelet does every five minutes: with new times.
func beat(ctx context.Context, k kubernetes.Interface, i int, at time.Time) error {
	if _, err := k.CoreV1().Nodes().UpdateStatus(ctx, node(i, at), metav1.UpdateOptions{FieldManager: "kubelet"}); err != nil {
		return fmt.Errorf("write status of Node %d: %w", i, err)
	}
	return nil
}

// rezone changes a Node's zone.
func rezone(ctx context.Context, k kubernetes.Interface, i int, zone string) error {
	n := node(i, time.Unix(0, 0))
	n.Labels[corev1.LabelTopologyZone] = zone
	if _, err := k.CoreV1().Nodes().Update(ctx, n, metav1.UpdateOptions{FieldManager: "kubelet"}); err != nil {
		return fmt.Errorf("change Node %d: %w", i, err)
	}
	return nil
}

// images is how many images a Node's status lists. A kubelet lists up to 50.
const images = 25

// node returns a Node like one that a kubelet and a cloud provider have written.
func node(i int, at time.Time) *corev1.Node {
	name := nodeName(i)
	ip := netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)})
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name,
			Labels: map[string]string{
				corev1.LabelHostname: name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64",
				"beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": "amd64",
				corev1.LabelTopologyZone: "region-1" + string(rune('a'+i%3)), corev1.LabelTopologyRegion: "region-1",
				corev1.LabelInstanceTypeStable: "general.4xlarge", "node.example.com/pool": "workers",
			},
			Annotations: map[string]string{
				"node.alpha.kubernetes.io/ttl":                           "300",
				"volumes.kubernetes.io/controller-managed-attach-detach": "true",
				"alpha.kubernetes.io/provided-node-ip":                   ip.String(),
				"csi.volume.kubernetes.io/nodeid":                        fmt.Sprintf(`{"disk.csi.example.com":"i-%016x"}`, i),
			},
		},
		Spec: corev1.NodeSpec{
			PodCIDR:    fmt.Sprintf("10.%d.%d.0/24", 192+i>>8, i&255),
			ProviderID: fmt.Sprintf("example:///region-1a/i-%016x", i),
		},
		Status: corev1.NodeStatus{
			Capacity: resources("16", "65842412Ki"), Allocatable: resources("15800m", "63694060Ki"),
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip.String()}, {Type: corev1.NodeHostName, Address: name}},
			NodeInfo: corev1.NodeSystemInfo{
				MachineID: hash(i, 1)[:32], SystemUUID: hash(i, 2)[:36], BootID: hash(i, 3)[:36],
				KernelVersion: "6.18.0-1-cloud-amd64", OSImage: "Debian GNU/Linux 13 (trixie)", ContainerRuntimeVersion: "containerd://2.1.4",
				KubeletVersion: "v1.36.3", OperatingSystem: "linux", Architecture: "amd64",
			},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: 10250}},
		},
	}
	n.Spec.PodCIDRs = []string{n.Spec.PodCIDR}
	for _, c := range []struct{ kind, reason, message string }{
		{"MemoryPressure", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"},
		{"DiskPressure", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"},
		{"PIDPressure", "KubeletHasSufficientPID", "kubelet has sufficient PID available"},
		{"Ready", "KubeletReady", "kubelet is posting ready status"},
	} {
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{
			Type: corev1.NodeConditionType(c.kind), Status: corev1.ConditionFalse, Reason: c.reason, Message: c.message,
			LastHeartbeatTime: metav1.NewTime(at), LastTransitionTime: metav1.NewTime(time.Unix(0, 0)),
		})
	}
	for k := range images {
		name := fmt.Sprintf("registry.example.com/team-%d/service-%d", k%7, k)
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{
			Names:     []string{name + "@sha256:" + hash(i%10, k), name + ":v1.42." + strconv.Itoa(k)},
			SizeBytes: int64(40_000_000 + k*1_234_567),
		})
	}
	return n
}

// hash returns 64 digits that do not compress. Nodes share most of their images.
func hash(i, k int) string {
	return fmt.Sprintf("%x", sha256.Sum256(fmt.Append(nil, i, " ", k)))
}

func resources(cpu, memory string) corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory),
		corev1.ResourceEphemeralStorage: resource.MustParse("101430960Ki"), corev1.ResourcePods: resource.MustParse("110"),
		"hugepages-1Gi": resource.MustParse("0"), "hugepages-2Mi": resource.MustParse("0"),
	}
}

// pod returns a Pod that runs on a node.
func pod(i int, node string) *corev1.Pod {
	ip := netip.AddrFrom4([4]byte{10, 128, byte(i >> 8), byte(i)}).String()
	started := metav1.NewTime(time.Unix(0, 0))
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "pod-" + strconv.Itoa(i), Namespace: namespace,
			Labels: map[string]string{"app.kubernetes.io/name": "web", "app.kubernetes.io/instance": "web", "pod-template-hash": "6d4b75cb6d"},
		},
		Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, HostIP: "172.16.0.1", StartTime: &started,
		},
	}
	for k, name := range []string{"web", "sidecar"} {
		c := corev1.Container{
			Name: name, Image: "registry.example.com/team/" + name + ":v1.42.0",
			Ports:          []corev1.ContainerPort{{Name: "http-" + name[:2], ContainerPort: int32(8080 + k)}},
			Resources:      corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m")}},
			ReadinessProbe: &corev1.Probe{PeriodSeconds: 5, ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{}}},
		}
		c.ReadinessProbe.TCPSocket.Port.IntVal = 8080
		for k := range 8 {
			c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("SETTING_%d", k), Value: "a value of some length"})
		}
		p.Spec.Containers = append(p.Spec.Containers, c)
		p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, corev1.ContainerStatus{
			Name: name, Image: c.Image, ImageID: "registry.example.com/team/" + name + "@sha256:" + hash(0, len(name)), Ready: true,
			ContainerID: "containerd://" + hash(i, len(name)),
			State:       corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: started}},
		})
	}
	for _, t := range []corev1.PodConditionType{corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady, corev1.PodScheduled} {
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, LastTransitionTime: started})
	}
	return p
}
