package clustertest

import (
	"fmt"
	"testing"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/images"
)

// Addresses of the peers' Service, whose port is 80 for TCP and UDP.
const (
	ClusterIP = "10.96.7.7"
	NodePort  = 30080
)

// peers are agnhost's netexec, which answers with its Pod's name: on port 8080 by HTTP,
// and on port 8081 over UDP. The Service selects other Pods with the label too.
const peers = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: %[1]s}
spec:
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s, service: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 1
      tolerations: [{operator: Exists}]
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: NotIn, values: [%[2]q]}]}]
      containers:
        - name: %[1]s
          image: %[3]s
          imagePullPolicy: Never
          args: [netexec]
          startupProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1, failureThreshold: 60}
---
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec:
  type: NodePort
  clusterIP: %[4]s
  ipFamilyPolicy: PreferDualStack
  selector: {service: %[1]s}
  ports:
    - {name: tcp, port: 80, targetPort: 8080, nodePort: %[5]d, protocol: TCP}
    - {name: udp, port: 80, targetPort: 8081, nodePort: %[5]d, protocol: UDP}
`

// StartPeers starts a Pod of that name on each node, except for one, and their Service.
// "" excepts no node.
func StartPeers(t *testing.T, c *cluster.Cluster, name, except string) {
	t.Helper()
	image, err := images.Reference("agnhost")
	Must(t, err)
	Must(t, c.Apply(t.Context(), fmt.Sprintf(peers, name, except, image, ClusterIP, NodePort)))
	Must(t, c.WaitForRollout(t.Context(), "default", "daemonset/"+name))
}
