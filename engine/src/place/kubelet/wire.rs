//! The part of the kubelet's PodResources API, version 1, that lists the devices of each container.
//!
//! Enters: the answer's bytes. Leaves: messages. Other fields (processors, memory, topology) are skipped.

/// The method that lists the devices of all containers of the node.
pub(super) const LIST: &str = "/v1.PodResourcesLister/List";

/// The answer: `ListPodResourcesResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Pods {
    #[prost(message, repeated, tag = "1")]
    pub pods: Vec<Pod>,
}

/// `PodResources`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Pod {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub namespace: String,
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

/// `ContainerResources`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerResources {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
    #[prost(message, repeated, tag = "5")]
    pub dynamic_resources: Vec<DynamicResource>,
}

/// `DynamicResource`: what a claim of dynamic resource allocation gave the container.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct DynamicResource {
    #[prost(message, repeated, tag = "4")]
    pub claim_resources: Vec<ClaimResource>,
}

/// `ClaimResource`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ClaimResource {
    #[prost(string, tag = "2")]
    pub driver_name: String,
    #[prost(string, tag = "4")]
    pub device_name: String,
}

/// `ContainerDevices`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ContainerDevices {
    #[prost(string, tag = "1")]
    pub resource_name: String,
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}
