package nodeclient

import (
	"context"
	"fmt"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// Services returns the Services of an agent, of a namespace or of all for "". It asks for all pages.
func Services(ctx context.Context, client nodev1alpha1connect.NodeServiceClient,
	namespace string) (list []*nodev1alpha1.Service, err error) {
	req := &nodev1alpha1.ListServicesRequest{Namespace: namespace}
	for {
		resp, err := servicesPage(ctx, client, req)
		if err != nil {
			return nil, err
		}
		list = append(list, resp.Services...)
		if resp.NextPageToken == "" {
			return list, nil
		}
		if resp.NextPageToken == req.PageToken {
			return nil, fmt.Errorf("the agent repeats page %q", req.PageToken)
		}
		req.PageToken = resp.NextPageToken
	}
}

func servicesPage(ctx context.Context, client nodev1alpha1connect.NodeServiceClient,
	req *nodev1alpha1.ListServicesRequest) (*nodev1alpha1.ListServicesResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	return client.ListServices(ctx, req)
}
